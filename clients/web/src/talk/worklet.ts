// What runs in the browser's audio thread: `microphone` cuts sound into packets of 20 ms at the wire's rate, `speaker` plays a jitter
// buffer. Both tell what they did; neither knows a server. Runs in an AudioWorkletGlobalScope.

import { SoundQueue } from "./queue";
import { Resampler } from "./resampler";
import { WIRE_RATE, type MicrophoneTold, type SpeakerAsked, type SpeakerTold } from "./worklet-messages";

const PACKET = 480; // 20 ms
const REPORT_EVERY = 12; // requests of 128 samples: about 60 ms

// TypeScript's libraries do not have this scope.
declare const sampleRate: number;
declare class AudioWorkletProcessor { readonly port: MessagePort }
declare function registerProcessor(name: string, type: new () => AudioWorkletProcessor): void;

class Microphone extends AudioWorkletProcessor {
  private readonly resampler = new Resampler(sampleRate, WIRE_RATE);
  private packet = new Float32Array(PACKET);
  private filled = 0;
  private open = true;

  constructor() {
    super();
    this.port.onmessage = ({ data }: MessageEvent<boolean>) => { this.open = data; };
  }

  process([input]: Float32Array[][]): boolean {
    const heard = this.open ? input?.[0] : undefined;
    const samples = this.resampler.feed(heard ?? new Float32Array(128)); // closed, time goes on in silence
    for (const sample of samples) {
      this.packet[this.filled++] = sample;
      if (this.filled === PACKET) this.send();
    }
    return true;
  }

  private send(): void {
    const told: MicrophoneTold = { samples: this.packet, level: levelOf(this.packet) };
    this.port.postMessage(told, [this.packet.buffer]);
    this.packet = new Float32Array(PACKET);
    this.filled = 0;
  }
}

class Speaker extends AudioWorkletProcessor {
  private readonly queue = new SoundQueue(sampleRate);
  private requests = 0;
  private sounds = false;
  private flushed = false;
  private level = 0;

  constructor() {
    super();
    this.port.onmessage = ({ data }: MessageEvent<SpeakerAsked>) => {
      if (data === "flush") {
        this.queue.flush();
        this.flushed = true;
      } else if (data === "end") this.queue.end();
      else this.queue.push(data.item, data.push);
    };
  }

  process(_: Float32Array[][], [output]: Float32Array[][]): boolean {
    const out = output?.[0];
    if (!out) return true;
    const sounds = this.queue.pull(out);
    const turned = sounds === this.sounds ? null : sounds ? "sounds" : "silent";
    this.sounds = sounds;
    this.level = Math.max(this.level, levelOf(out));
    this.requests += 1;
    const stopped = this.flushed && this.queue.idle && !sounds;
    if (turned !== null || stopped || this.requests % REPORT_EVERY === 0) this.report(turned, stopped);
    return true;
  }

  private report(turned: SpeakerTold["turned"], flushed: boolean): void {
    const { played, waitingMs, gaps } = this.queue;
    const told: SpeakerTold = { item: played?.item ?? null, ms: played?.ms ?? 0, level: this.level, waitingMs, gaps, turned, flushed };
    this.port.postMessage(told);
    this.level = 0;
    if (flushed) this.flushed = false;
  }
}

/** Root mean square. */
function levelOf(samples: Float32Array): number {
  return Math.sqrt(samples.reduce((sum, sample) => sum + sample * sample, 0) / samples.length);
}

registerProcessor("microphone", Microphone);
registerProcessor("speaker", Speaker);
