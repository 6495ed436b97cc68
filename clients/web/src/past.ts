// The way back: a picture of the world after each of the last chunks, as buttons from the oldest to the newest. Owns the pictures;
// how far back the server can go is the server's to say.

import { byId, make } from "./dom";

const ON_THE_WAY = 2; // blocks that the server may have made, and so moments that it may have forgotten, before it hears of us

interface Moment { button: HTMLButtonElement; picture: HTMLCanvasElement }

export class Past {
  private readonly moments = new Map<number, Moment>(); // by the chunk that is the next one then, rising
  private readonly list = byId("past");

  constructor(private readonly onChosen: (nextChunk: number) => void) {}

  /** The chunk that is the next one at the newest moment. */
  get newest(): number | null {
    return [...this.moments.keys()].at(-1) ?? null;
  }

  /** The last frame of a chunk was shown. `oldest`: the smallest chunk that a rewind can go back to, null: none. */
  shown(chunk: number, world: HTMLCanvasElement, oldest: number | null): void {
    const picture = make("canvas", { width: world.width, height: world.height });
    picture.getContext("2d", { alpha: false })!.drawImage(world, 0, 0);
    const button = make("button", { type: "button" }, picture);
    button.addEventListener("click", () => {
      scrollTo(0, 0); // on a phone these pictures stand below the world
      this.onChosen(chunk + 1);
    });
    this.remove((next) => next === chunk + 1 || oldest === null || next < oldest + ON_THE_WAY);
    this.moments.set(chunk + 1, { button, picture });
    this.list.append(make("li", {}, button));
    this.label();
  }

  /** The world went back to `nextChunk`; its picture, when there is one. */
  backTo(nextChunk: number): HTMLCanvasElement | null {
    this.remove((next) => next > nextChunk);
    this.label();
    return this.moments.get(nextChunk)?.picture ?? null;
  }

  /** The moment that lies `blocks` back, or the oldest; null when there is none before the present one. */
  before(blocks: number): number | null {
    const earlier = [...this.moments.keys()].slice(0, -1);
    return earlier.length === 0 ? null : earlier[Math.max(0, earlier.length - blocks)]!;
  }

  clear(): void {
    this.remove(() => true);
  }

  private remove(gone: (nextChunk: number) => boolean): void {
    for (const [next, { button }] of this.moments) {
      if (!gone(next)) continue;
      const following = button.parentElement?.nextElementSibling?.querySelector("button");
      if (document.activeElement === button) following?.focus({ preventScroll: true }); // do not lose who walks with Tab
      button.parentElement?.remove();
      this.moments.delete(next);
    }
    byId("past-section").hidden = this.moments.size === 0;
  }

  private label(): void {
    const back = this.moments.size - 1;
    [...this.moments.values()].forEach(({ button }, i) => {
      const words = i === back ? "now" : i === back - 1 ? "one block ago" : `${back - i} blocks ago`;
      button.title = i === back ? "The present" : `Go back to ${words}`;
      button.setAttribute("aria-label", button.title);
      button.disabled = i === back;
    });
  }
}
