// Sound that waits to be played: a jitter buffer. Pure; the worklet feeds it and empties it. Samples are mono at one rate.
// It waits a little before the first sample, so that packets may come unevenly; each gap makes the next wait longer. Emptied at
// once by `flush`, with a fade as long as one request (128 samples), because a cut wave clicks.

const LEAD_MS = 60;
const LEAD_STEP_MS = 20;
const MOST_LEAD_MS = 240;
const MOST_WAITING_S = 60; // sound comes at the pace of speech: more than this is a fault, and the oldest gives way

export interface Played { item: string; ms: number }

interface Piece { item: string; samples: Float32Array; at: number }

export class SoundQueue {
  gaps = 0;
  private pieces: Piece[] = [];
  private count = 0;
  private leadMs = LEAD_MS;
  private hold = 0; // samples to wait before the next one sounds
  private open = false; // more is to come
  private fading: Float32Array | null = null;
  private readonly heard = new Map<string, number>();
  private last: string | null = null;

  constructor(private readonly rate: number) {}

  push(item: string, samples: Float32Array): void {
    if (this.count === 0 && !this.open) this.hold = Math.round((this.leadMs * this.rate) / 1000);
    this.open = true;
    this.pieces.push({ item, samples, at: 0 });
    this.count += samples.length;
    while (this.count > MOST_WAITING_S * this.rate) this.count -= this.pieces.shift()!.samples.length;
  }

  /** Nothing follows what was pushed: it is played to its end, and its end is no gap. */
  end(): void {
    this.open = false;
    this.hold = 0;
  }

  /** Nothing of what was pushed is heard any more. */
  flush(): void {
    const next = this.pieces[0];
    this.fading = next && this.hold === 0 ? next.samples.subarray(next.at) : null;
    this.pieces = [];
    this.count = 0;
    this.hold = 0;
    this.open = false;
  }

  /** Fills `out`; silence where there is nothing. Says whether anything sounds. */
  pull(out: Float32Array): boolean {
    out.fill(0);
    if (this.fading) {
      const { fading } = this;
      this.fading = null;
      for (let i = 0; i < Math.min(out.length, fading.length); i++) out[i] = fading[i]! * (1 - i / out.length);
      return true;
    }
    const skipped = Math.min(this.hold, out.length);
    this.hold -= skipped;
    let filled = skipped;
    while (filled < out.length && this.pieces.length > 0) filled += this.take(out, filled);
    if (filled < out.length && this.open) this.stalled();
    return filled > skipped;
  }

  private take(out: Float32Array, from: number): number {
    const piece = this.pieces[0]!;
    const part = piece.samples.subarray(piece.at, piece.at + out.length - from);
    out.set(part, from);
    piece.at += part.length;
    this.count -= part.length;
    this.last = piece.item;
    this.heard.set(piece.item, (this.heard.get(piece.item) ?? 0) + part.length);
    if (piece.at === piece.samples.length) this.pieces.shift();
    if (this.heard.size > 8) this.heard.delete(this.heard.keys().next().value!);
    return part.length;
  }

  /** The next packet is late: when it comes, it waits as a first one does. */
  private stalled(): void {
    this.gaps += 1;
    this.leadMs = Math.min(MOST_LEAD_MS, this.leadMs + LEAD_STEP_MS);
    this.open = false;
  }

  /** How much of the latest item was played. */
  get played(): Played | null {
    return this.last === null ? null : { item: this.last, ms: (this.heard.get(this.last)! * 1000) / this.rate };
  }

  get waitingMs(): number {
    return (this.count * 1000) / this.rate;
  }

  get idle(): boolean {
    return this.count === 0 && this.fading === null;
  }
}
