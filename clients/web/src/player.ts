// From arrived frames to shown frames: decode, wait for the beat, draw, report. Owns the queue of decoded pictures.
// Invariant: frames are shown in order, each once, none is dropped within an epoch; nothing is shown after `flush`.

import { createDecoder, type Decoder, type Picture } from "./decoder";
import { Pacer } from "./pacer";
import type { WorldPicture } from "./picture";
import type { Format, Frame } from "./protocol";

export interface Stream {
  format: Format; codec: string | null; width: number; height: number; fps: number; framesPerBlock: number;
}
export interface PlayerHooks { onShown: (frame: Frame, now: number) => void; onDecoderFailure: (reason: string) => void }

export class Player {
  shownFrames = 0;
  private decoder: Decoder | null = null;
  private pacer = new Pacer(10, 3);
  private queue: { frame: Frame; picture: Picture }[] = [];
  private generation = 0;
  private epoch = 0;
  private stream = "";
  private scheduled = false;

  constructor(private readonly picture: WorldPicture, private readonly hooks: PlayerHooks) {
    document.addEventListener("visibilitychange", () => {
      this.scheduled = false; // a frame request made while visible is not served while hidden
      this.schedule();
    });
  }

  /** Makes ready for a stream; false when it is the present one, whose waiting frames stay. */
  configure(stream: Stream): boolean {
    if (this.decoder && JSON.stringify(stream) === this.stream) return false;
    this.stream = JSON.stringify(stream);
    this.flush();
    this.decoder?.close();
    this.pacer = new Pacer(stream.fps, stream.framesPerBlock);
    this.picture.resize(stream.width, stream.height);
    const generation = this.generation;
    try {
      this.decoder = createDecoder({
        ...stream,
        onPicture: (frame, picture) => this.decoded(frame, picture),
        onFailure: (reason) => { if (generation <= this.generation) this.hooks.onDecoderFailure(reason); },
      });
    } catch (error) {
      this.decoder = null;
      queueMicrotask(() => this.hooks.onDecoderFailure(String(error)));
    }
    return true;
  }

  blockArrived(now: number): void {
    this.pacer.blockArrived(now);
  }

  push(frame: Frame): void {
    this.decoder?.decode(frame);
  }

  /** Forgets everything that was not shown yet, and what is still being decoded of the epochs before this one. */
  flush(epoch = 0): void {
    this.generation += 1;
    this.epoch = epoch;
    for (const { picture } of this.queue) picture.close();
    this.queue = [];
    this.pacer.restart();
  }

  /** The measured beat of before a pause or a lost connection means nothing after it. */
  restartBeat(): void {
    this.pacer.restart();
  }

  get waiting(): number {
    return this.queue.length;
  }

  stop(): void {
    this.flush();
    this.decoder?.close();
    this.decoder = null;
  }

  private decoded(frame: Frame, picture: Picture): void {
    if (frame.epoch < this.epoch) return picture.close();
    this.queue.push({ frame, picture });
    this.schedule();
  }

  private schedule(): void {
    if (this.scheduled || this.queue.length === 0) return;
    this.scheduled = true;
    // A hidden page gets no animation frames; it still takes its frames, so that the server is not left waiting.
    if (document.hidden) setTimeout(() => this.beat(), this.pacer.waitMs(performance.now()));
    else requestAnimationFrame(() => this.beat());
  }

  private beat(): void {
    this.scheduled = false;
    const next = this.queue[0];
    if (!next) return;
    const now = performance.now();
    if (this.pacer.isDue(now)) {
      this.queue.shift();
      this.picture.draw(next.picture);
      next.picture.close();
      this.shownFrames += 1;
      this.pacer.shown(now, this.queue.length);
      this.hooks.onShown(next.frame, performance.now());
    }
    this.schedule();
  }
}
