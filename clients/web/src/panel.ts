// The side panel: the place, start pictures, seed, session buttons. Turns what the user wants into the hooks' calls.

import { fetchPicture, type ModelInfo, type StartPicture } from "./api";
import { byId, make, showWhatOpens } from "./dom";

export type Beginning = { start: string } | { picture: Blob } | null;

export interface PanelHooks {
  onPrompt: (prompt: string) => void;
  onReset: () => void;
  onRenew: () => void;
  onClose: () => void;
  onModel: (name: string) => void;
  /** What was uploaded is no picture. */
  onNoPicture: () => void;
}

interface Choice { beginning: Beginning; tile: Element | null; own: Element | null }

const NOTHING: Choice = { beginning: null, tile: null, own: null };
const THUMBNAIL_PIXELS = 144;

/** "snow-2" is a picture of "snow". */
export function stemOf(start: string): string {
  return start.replace(/[-_. ]*\d+$/, "").replaceAll(/[-_.]+/g, " ");
}

/** The one suggestion that speaks of what a start picture is named after; null when none or several do. */
export function promptOf(start: string, prompts: readonly string[]): string | null {
  const found = prompts.filter((prompt) => prompt.toLowerCase().includes(stemOf(start).toLowerCase()));
  return found.length === 1 ? found[0]! : null;
}

/** The seed that a text means: undefined (any) when there is none, null when it is no seed. */
export function seedOf(text: string): number | undefined | null {
  const digits = text.trim();
  if (digits === "") return undefined;
  return /^\d+$/.test(digits) && Number.isSafeInteger(Number(digits)) ? Number(digits) : null;
}

export class Panel {
  /** What the next reset or session begins from. */
  beginning: Beginning = null;
  private readonly prompt = byId<HTMLInputElement>("prompt");
  private readonly seedInput = byId<HTMLInputElement>("seed");
  private readonly modelSelect = byId<HTMLSelectElement>("model");
  private seedTyped = false;
  private refusedPrompt: string | null = null; // what the field held when the place was refused
  private settled = NOTHING; // what the world has begun from
  private readonly chosen = new Map<string, Choice>(); // since then, in order, by the id of the message that asks for it
  private choices = 0;

  constructor(private readonly hooks: PanelHooks) {
    byId("prompt-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const prompt = this.prompt.value.trim();
      if (prompt === "") return;
      this.refusedPrompt = null;
      hooks.onPrompt(prompt);
      this.prompt.blur(); // back to walking
      this.backToTheWorld();
    });
    byId("reset").addEventListener("click", () => { this.backToTheWorld(); hooks.onReset(); });
    byId("renew").addEventListener("click", () => { this.backToTheWorld(); hooks.onRenew(); });
    byId("close").addEventListener("click", () => hooks.onClose());
    byId("dice").addEventListener("click", () => {
      this.seedInput.value = String(Math.floor(Math.random() * 1_000_000));
      this.seedTyped = true;
      this.showSeedError();
    });
    this.seedInput.addEventListener("input", () => {
      this.seedTyped = true;
      this.showSeedError();
    });
    this.seedInput.addEventListener("keydown", (event) => { if (event.key === "Enter") hooks.onReset(); });
    this.modelSelect.addEventListener("change", () => hooks.onModel(this.modelSelect.value));
    const upload = byId<HTMLInputElement>("upload");
    upload.addEventListener("change", () => {
      const file = upload.files?.[0];
      if (file) void this.addOwn(file);
      upload.value = "";
    });
    const menu = byId("menu");
    menu.addEventListener("click", () => this.open(menu.getAttribute("aria-expanded") !== "true"));
    byId("fork").addEventListener("click", () => this.backToTheWorld()); // two pictures need the room
    showWhatOpens(byId<HTMLDetailsElement>("about"));
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") this.open(false); });
  }

  /** The drawer, on small landscape screens; elsewhere the panel is always there. */
  open(open: boolean): void {
    byId("panel").toggleAttribute("data-open", open);
    byId("menu").setAttribute("aria-expanded", String(open));
  }

  /** What was chosen is seen: the drawer closes, and a phone's page, where the panel stands below the world, goes up to it. */
  private backToTheWorld(): void {
    this.open(false);
    scrollTo(0, 0);
  }

  focusPrompt(): void {
    this.open(true);
    this.prompt.focus();
    this.prompt.select();
  }

  /** The seed that was typed since the last beginning; none typed: any. */
  get seed(): number | undefined {
    const seed = seedOf(this.seedInput.value);
    return this.seedTyped && typeof seed === "number" ? seed : undefined;
  }

  /** Whether a world can begin with what the seed's field holds; when not, the field says why and gets the focus. */
  seedIsValid(): boolean {
    const valid = this.showSeedError();
    if (!valid) {
      this.open(true);
      this.seedInput.focus();
    }
    return valid;
  }

  showSeed(seed: number): void {
    this.seedTyped = false;
    this.seedInput.value = String(seed);
    this.showSeedError();
  }

  private showSeedError(): boolean {
    const valid = seedOf(this.seedInput.value) !== null;
    this.seedInput.setAttribute("aria-invalid", String(!valid));
    byId("seed-error").hidden = valid;
    return valid;
  }

  models(models: ModelInfo[], chosen: string): void {
    byId("model-row").hidden = models.length < 2;
    this.modelSelect.replaceChildren(...models.map(({ name }) => make("option", { value: name, textContent: name })));
    this.modelSelect.value = chosen;
  }

  prompts(prompts: readonly string[]): void {
    const chips = prompts.map((prompt) => {
      const chip = make("button", { type: "button", textContent: prompt, title: prompt });
      chip.dataset.prompt = prompt;
      chip.setAttribute("aria-pressed", "false");
      chip.addEventListener("click", () => {
        this.prompt.value = ""; // what was typed before is not where one is now
        this.hooks.onPrompt(prompt);
        this.backToTheWorld();
      });
      return make("li", {}, chip);
    });
    byId("prompts").replaceChildren(...chips);
  }

  here(prompt: string): void {
    for (const chip of byId("prompts").querySelectorAll("button")) {
      chip.setAttribute("aria-pressed", String(chip.dataset.prompt?.toLowerCase() === prompt.trim().toLowerCase()));
    }
  }

  starts(starts: readonly StartPicture[], takesImage: boolean): void {
    byId("starts-section").hidden = starts.length === 0 && !takesImage;
    byId("own-start").hidden = !takesImage;
    const stems = starts.map(({ name }) => stemOf(name));
    const list = byId("starts");
    const own = list.lastElementChild!;
    const tiles = starts.map((start, i) => {
      const alone = stems.filter((stem) => stem === stems[i]).length === 1;
      const words = alone ? stems[i]! : start.name.replaceAll(/[-_.]+/g, " ");
      return make("li", {}, this.tile(words, { start: start.name }, fetchPicture(start.url)));
    });
    list.toggleAttribute("data-many", tiles.length > 8);
    list.replaceChildren(...tiles, own);
  }

  facts(facts: Record<string, string>): void {
    byId("facts").replaceChildren(
      ...Object.entries(facts).map(([name, value]) => make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value }))),
    );
  }

  /** The place was refused; what was typed stays to be mended. */
  promptRefused(): void {
    if (document.activeElement !== this.prompt) this.refusedPrompt = this.prompt.value; // else something new is being typed
  }

  /** The id of the newest choice that was not answered. */
  get choice(): string | undefined {
    return [...this.chosen.keys()].at(-1);
  }

  /** The world began from what was chosen then. */
  began(choice: string | undefined): void {
    const found = this.chosen.get(choice ?? "");
    if (!found) return;
    this.settled = found;
    for (const earlier of this.chosen.keys()) {
      this.chosen.delete(earlier);
      if (earlier === choice) return;
    }
  }

  /** A later choice came before this one was asked for. */
  overtaken(choice: string | undefined): void {
    this.chosen.delete(choice ?? "");
  }

  forgetBeginning(): void {
    this.beginning = null;
    this.settled = NOTHING;
    this.chosen.clear();
  }

  /** The world went on with something else: a refused place that nobody has mended leaves the field. */
  worked(): void {
    if (this.prompt.value === this.refusedPrompt) this.prompt.value = "";
    this.refusedPrompt = null;
  }

  /** The world can't begin from what was chosen then: an own picture leaves, and what was chosen besides stays chosen. */
  takeBack(choice: string | undefined): void {
    const refused = this.chosen.get(choice ?? "");
    if (!refused) return;
    this.chosen.delete(choice!);
    refused.own?.remove();
    const { beginning, tile } = [...this.chosen.values()].at(-1) ?? this.settled;
    this.beginning = beginning;
    this.press(tile);
  }

  /** What acts on a session, here and in the bar; without one it would do nothing. */
  enable(enabled: boolean): void {
    for (const id of ["close", "reset", "fork", "back", "pause"]) byId<HTMLButtonElement>(id).disabled = !enabled;
  }

  private async addOwn(file: File): Promise<void> {
    let bitmap;
    try {
      bitmap = await createImageBitmap(file);
    } catch {
      this.backToTheWorld();
      return this.hooks.onNoPicture();
    }
    const tile = this.tile("yours", { picture: file }, Promise.resolve(bitmap));
    const item = make("li", {}, tile);
    byId("starts").lastElementChild!.before(item);
    this.choose(tile, { picture: file }, item);
  }

  private choose(tile: Element, beginning: Beginning, own: Element | null): void {
    this.choices += 1;
    this.chosen.set(`start-${this.choices}`, { beginning, tile, own });
    this.beginning = beginning;
    this.press(tile);
    this.backToTheWorld();
    this.hooks.onReset();
  }

  private press(tile: Element | null): void {
    for (const each of byId("starts").querySelectorAll("button")) each.setAttribute("aria-pressed", String(each === tile));
  }

  private tile(words: string, beginning: Exclude<Beginning, null>, picture: Promise<ImageBitmap>): HTMLButtonElement {
    const canvas = make("canvas", { width: THUMBNAIL_PIXELS, height: THUMBNAIL_PIXELS });
    const tile = make("button", { type: "button", title: `Start from ${words}` }, canvas, make("span", { textContent: words }));
    tile.setAttribute("aria-pressed", "false");
    tile.addEventListener("click", () => this.choose(tile, beginning, null));
    picture.then(
      (bitmap) => {
        const side = Math.min(bitmap.width, bitmap.height);
        const context = canvas.getContext("2d")!;
        context.imageSmoothingQuality = "high";
        context.drawImage(
          bitmap, (bitmap.width - side) / 2, (bitmap.height - side) / 2, side, side, 0, 0, THUMBNAIL_PIXELS, THUMBNAIL_PIXELS,
        );
        bitmap.close();
      },
      () => tile.classList.add("empty"), // the name is still a choice
    );
    return tile;
  }
}
