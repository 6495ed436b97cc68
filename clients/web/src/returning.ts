// Looks whether a server that has gone away is there again, with growing pauses. Owns its timer and nothing else.

export interface ReturningHooks {
  /** Whether the server answers; never throws. */
  answers: () => Promise<boolean>;
  onBack: () => void;
}

const PAUSES_MS = [1_000, 2_000, 4_000, 6_000]; // the last one again and again

export class Returning {
  private timer = 0;
  private watch = 0; // counts what was begun: an answer to a watch that was stopped is none

  constructor(private readonly hooks: ReturningHooks) {}

  begin(): void {
    this.stop();
    this.lookLater(0);
  }

  stop(): void {
    clearTimeout(this.timer);
    this.watch += 1;
  }

  private lookLater(looks: number): void {
    const pauseMs = PAUSES_MS[Math.min(looks, PAUSES_MS.length - 1)]!;
    this.timer = window.setTimeout(() => void this.look(looks), pauseMs);
  }

  private async look(looks: number): Promise<void> {
    const { watch } = this;
    const there = await this.hooks.answers();
    if (watch !== this.watch) return;
    if (there) this.hooks.onBack();
    else this.lookLater(looks + 1);
  }
}
