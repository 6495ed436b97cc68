// When the next frame is due on the screen. Frames arrive in bursts (a block at a time) and a little unevenly; the pacer spaces
// them by a running mean of what the server really delivers, and hurries when more than the wanted lead waits.
// Pure: `now` (milliseconds) is an argument. Adds no delay of its own: a frame that is late is due at once.

const MEAN_WEIGHT = 0.2; // of a new block in the running mean: settles within about ten blocks
const OUTLIER_MS = 2_000; // longer gaps are pauses or reconnects, not the server's speed
const REFRESH_SLACK_MS = 5; // a frame due within this much of a screen refresh is shown at that refresh
const REFRESH_MS = 17; // a frame up to one refresh late keeps the beat; a later one had not arrived, and sets a new beat
const DRAIN = 0.98; // while frames wait the beat is this much faster, so that a late block's delay wears off again

export class Pacer {
  private readonly nominalMs: number;
  private meanMs: number;
  private intervals = 0;
  private lastBlockAt: number | null = null;
  private dueAt = -Infinity;

  constructor(fps: number, private readonly framesPerBlock: number) {
    this.nominalMs = 1000 / Math.max(fps, 0.1);
    this.meanMs = this.nominalMs;
  }

  /** A block has arrived; its frames will follow. */
  blockArrived(now: number): void {
    if (this.lastBlockAt !== null && now - this.lastBlockAt < OUTLIER_MS) {
      const perFrameMs = (now - this.lastBlockAt) / this.framesPerBlock;
      this.intervals += 1;
      this.meanMs += Math.max(MEAN_WEIGHT, 1 / this.intervals) * (perFrameMs - this.meanMs);
    }
    this.lastBlockAt = now;
  }

  /** Milliseconds between frames when `waiting` frames wait behind the one shown now. */
  periodMs(waiting: number): number {
    const base = Math.min(Math.max(this.meanMs, this.nominalMs * 0.85), this.nominalMs * 4);
    const excess = waiting - this.framesPerBlock; // up to one block in hand is the wanted lead
    if (excess <= 0) return waiting > 0 ? base * DRAIN : base;
    return base / (1 + Math.min(excess / this.framesPerBlock, 1));
  }

  isDue(now: number): boolean {
    return now >= this.dueAt - REFRESH_SLACK_MS;
  }

  /** Milliseconds until the next frame is due. */
  waitMs(now: number): number {
    return Math.max(0, this.dueAt - now);
  }

  /** A frame was shown, `waiting` others wait. Keeps the beat when on time; starts a new beat when late. */
  shown(now: number, waiting: number): void {
    const period = this.periodMs(waiting);
    const onBeat = Math.abs(now - this.dueAt) <= Math.min(REFRESH_MS, period / 2);
    this.dueAt = (onBeat ? this.dueAt : now) + period;
  }

  /** After a pause, a reset or a reconnect the measured speed stays, the beat starts anew. */
  restart(): void {
    this.lastBlockAt = null;
    this.dueAt = -Infinity;
  }
}
