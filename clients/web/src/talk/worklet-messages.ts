// What the page and the audio thread say to each other. Pure.

export const WIRE_RATE = 24_000;

export type MicrophoneTold = { samples: Float32Array<ArrayBuffer>; level: number };
export type SpeakerAsked = { push: Float32Array; item: string } | "end" | "flush";
export interface SpeakerTold {
  item: string | null; ms: number; level: number; waitingMs: number; gaps: number;
  /** The first sound after silence, or the first silence after sound, is in this report. */
  turned: "sounds" | "silent" | null;
  flushed: boolean;
}
