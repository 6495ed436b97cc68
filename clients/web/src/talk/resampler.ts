// From a microphone's rate to the wire's, in a stream: a windowed sinc at the lower of both Nyquist frequencies. Pure.
// Only where a browser can't open the microphone at 24 kHz itself.

const CROSSINGS = 12; // of the sinc, on each side
const CUTOFF = 0.92;

export class Resampler {
  private readonly step: number;
  private readonly scale: number;
  private readonly reach: number;
  private kept: Float32Array;
  private at: number; // position of the next output sample in `kept`

  constructor(from: number, to: number) {
    this.step = from / to;
    this.scale = Math.min(1, to / from) * CUTOFF;
    this.reach = Math.ceil(CROSSINGS / this.scale);
    this.kept = new Float32Array(this.reach);
    this.at = this.reach;
  }

  feed(samples: Float32Array): Float32Array {
    if (this.step === 1) return samples.slice();
    const all = new Float32Array(this.kept.length + samples.length);
    all.set(this.kept);
    all.set(samples, this.kept.length);
    const out: number[] = [];
    for (; this.at + this.reach < all.length; this.at += this.step) out.push(this.sample(all));
    const drop = Math.max(0, Math.floor(this.at) - this.reach);
    this.kept = all.slice(drop);
    this.at -= drop;
    return Float32Array.from(out);
  }

  private sample(all: Float32Array): number {
    const first = Math.ceil(this.at - this.reach);
    let sum = 0;
    for (let i = Math.max(0, first); i <= this.at + this.reach; i++) {
      const x = (i - this.at) * this.scale;
      const window = 0.5 + 0.5 * Math.cos((Math.PI * x) / CROSSINGS);
      const sinc = x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x);
      if (Math.abs(x) < CROSSINGS) sum += all[i]! * sinc * window;
    }
    return sum * this.scale;
  }
}
