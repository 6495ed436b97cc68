// When who spoke, and what it took: the delays that a caller feels. Pure; `now` is an argument, all in milliseconds of one clock.

const LOUD = 0.008; // -42 dBFS, root mean square of 20 ms
const LOST_AFTER_MS = 4_000; // an answer or stop that comes later belongs to something else

export class Timing {
  /** From the user's last loud packet to the first sound of the answer. */
  firstAudioMs: number | null = null;
  /** From the first sample of the user's speech to the speaker's last. */
  bargeInMs: number | null = null;
  private appendedMs = 0; // position of the end of what was sent, in the session
  private packetAt = 0;
  private loudAt: number | null = null;
  private endedAt: number | null = null;
  private interruptedAt: number | null = null;

  packet(now: number, ms: number, level: number): void {
    this.appendedMs += ms;
    this.packetAt = now;
    if (level >= LOUD) this.loudAt = now;
  }

  /** The server heard speech that began at this position of what was sent. */
  userBegan(positionMs: number, sounding: boolean): void {
    this.interrupts(this.packetAt - (this.appendedMs - positionMs), sounding);
  }

  /** The user wants to speak, since `at`, while the voice sounds or not. */
  interrupts(at: number, sounding: boolean): void {
    this.endedAt = null;
    this.interruptedAt = sounding ? at : null;
  }

  userEnded(now: number): void {
    this.endedAt = this.loudAt ?? now;
  }

  /** The answer begins to sound. */
  sounds(now: number): void {
    this.firstAudioMs = since(this.endedAt, now) ?? this.firstAudioMs;
    this.endedAt = null;
  }

  /** The speaker was emptied and is silent. */
  stopped(now: number): void {
    this.bargeInMs = since(this.interruptedAt, now) ?? this.bargeInMs;
    this.interruptedAt = null;
  }
}

function since(at: number | null, now: number): number | null {
  return at !== null && now >= at && now - at < LOST_AFTER_MS ? now - at : null;
}
