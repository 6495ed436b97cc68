// What the status strip shows: rates over a sliding window and the time from a key to the picture that reflects it. Pure.

export class RateMeter {
  private samples: { at: number; amount: number }[] = [];
  private since: number | null = null;

  constructor(private readonly windowMs = 3_000) {}

  add(now: number, amount = 1): void {
    this.since ??= now;
    this.samples.push({ at: now, amount });
  }

  perSecond(now: number): number {
    this.samples = this.samples.filter((sample) => now - sample.at < this.windowMs);
    if (this.since === null || this.samples.length === 0) return 0;
    const spanMs = Math.min(this.windowMs, Math.max(now - this.since, 1_000));
    return (this.samples.reduce((sum, sample) => sum + sample.amount, 0) * 1000) / spanMs;
  }
}

/** Key to photon: from a key event to the first displayed frame whose header says that the event has been applied. */
export class LatencyMeter {
  private waiting: { eventId: number; at: number }[] = [];
  private recent: number[] = [];

  sent(eventId: number, at: number): void {
    this.waiting.push({ eventId, at });
    if (this.waiting.length > 256) this.waiting.shift();
  }

  shown(appliedEventId: number | null, now: number): void {
    if (appliedEventId === null) return;
    while (this.waiting[0] && this.waiting[0].eventId <= appliedEventId) {
      this.recent.push(now - this.waiting.shift()!.at);
      if (this.recent.length > 40) this.recent.shift();
    }
  }

  forget(): void {
    this.waiting = [];
  }

  get last(): number | null {
    return this.recent.at(-1) ?? null;
  }

  get median(): number | null {
    if (this.recent.length === 0) return null;
    return [...this.recent].sort((a, b) => a - b)[Math.floor((this.recent.length - 1) / 2)]!;
  }
}
