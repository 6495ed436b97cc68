import { Captions } from "@page/talk/captions";
import { fromBase64, readEvent, toBase64 } from "@page/talk/events";
import { SoundQueue } from "@page/talk/queue";
import { Resampler } from "@page/talk/resampler";
import { Timing } from "@page/talk/timing";

const RATE = 24_000;
const REQUEST = 128;
const LEAD = (60 * RATE) / 1000;
const ones = (length: number) => new Float32Array(length).fill(1);

/** Everything that sounds in so many requests. */
function pull(queue: SoundQueue, requests: number): number[] {
  const out = new Float32Array(REQUEST);
  return Array.from({ length: requests }, () => {
    queue.pull(out);
    return [...out];
  }).flat();
}

describe("the jitter buffer", () => {
  it("waits for its lead, then plays everything in order", () => {
    const queue = new SoundQueue(RATE);
    queue.push("a", Float32Array.from([1, 2, 3]));
    queue.push("a", Float32Array.from([4]));
    const out = pull(queue, 12);
    expect(out.slice(LEAD, LEAD + 5)).toEqual([1, 2, 3, 4, 0]);
    expect(out.slice(0, LEAD).every((sample) => sample === 0)).toBe(true);
  });

  it("hears no gap between packets that come late by less than the lead", () => {
    const queue = new SoundQueue(RATE);
    const packet = (80 * RATE) / 1000;
    let out: number[] = [];
    for (let i = 0; i < 20; i++) { // every second one 48 ms late
      const late = i % 2 === 1 ? 9 : 0;
      if (late) out = out.concat(pull(queue, late));
      queue.push("a", ones(packet));
      out = out.concat(pull(queue, packet / REQUEST - late));
    }
    expect(queue.gaps).toBe(0);
    expect(out.indexOf(0, LEAD)).toBe(-1);
  });

  it("counts a packet that comes too late, and waits longer the next time", () => {
    const queue = new SoundQueue(RATE);
    queue.push("a", ones(1_920));
    pull(queue, 40);
    expect(queue.gaps).toBe(1);
    queue.push("a", ones(1_920));
    expect(pull(queue, 30).indexOf(1)).toBe((80 * RATE) / 1000);
  });

  it("does not take the end of what is said for a gap, and plays what is short at once", () => {
    const queue = new SoundQueue(RATE);
    queue.push("a", ones(100));
    queue.end();
    expect(pull(queue, 1).filter((sample) => sample === 1)).toHaveLength(100);
    pull(queue, 5);
    expect(queue.gaps).toBe(0);
  });

  it("is silent one request after a flush, without a click, and tells how much was heard", () => {
    const queue = new SoundQueue(RATE);
    queue.push("a", ones(24_000));
    pull(queue, 20);
    const heard = ((20 * REQUEST - LEAD) * 1000) / RATE;
    queue.flush();
    const fade = pull(queue, 1);
    expect(fade[0]).toBe(1);
    expect(Math.max(...fade.slice(1).map((sample, i) => Math.abs(sample - fade[i]!)))).toBeLessThan(0.01);
    expect(pull(queue, 10).every((sample) => sample === 0)).toBe(true);
    expect(queue.played).toEqual({ item: "a", ms: heard });
    expect(queue.idle).toBe(true);
  });

  it("tells what was heard of the item that sounds, not of the one that waits", () => {
    const queue = new SoundQueue(RATE);
    queue.push("a", ones(REQUEST));
    queue.end();
    queue.push("b", ones(REQUEST));
    pull(queue, 1);
    expect(queue.played).toEqual({ item: "a", ms: (REQUEST * 1000) / RATE });
  });

  it("keeps no more than a minute", () => {
    const queue = new SoundQueue(RATE);
    for (let i = 0; i < 70; i++) queue.push("a", ones(RATE));
    expect(queue.waitingMs).toBe(60_000);
  });
});

describe("the resampler", () => {
  const tone = (hz: number, rate: number, seconds: number) =>
    Float32Array.from({ length: rate * seconds }, (_, i) => Math.sin((2 * Math.PI * hz * i) / rate));
  const rms = (samples: Float32Array) => Math.sqrt(samples.reduce((sum, sample) => sum + sample * sample, 0) / samples.length);
  const feed = (resampler: Resampler, samples: Float32Array) => {
    const out: number[] = [];
    for (let at = 0; at < samples.length; at += REQUEST) out.push(...resampler.feed(samples.subarray(at, at + REQUEST)));
    return Float32Array.from(out);
  };

  it.each([44_100, 48_000, 16_000])("keeps a tone of 1 kHz from %d Hz, and the time", (rate) => {
    const out = feed(new Resampler(rate, RATE), tone(1_000, rate, 1));
    expect(Math.abs(out.length - RATE)).toBeLessThan(40);
    const middle = out.subarray(2_400, 21_600); // whole periods: correlation with the tone itself, in and out of phase
    const [re, im] = [Math.cos, Math.sin].map((wave) => middle.reduce((sum, x, i) => sum + x * wave((2 * Math.PI * 1_000 * i) / RATE), 0) / middle.length);
    expect(2 * Math.hypot(re!, im!)).toBeCloseTo(1, 2);
    expect(rms(middle)).toBeCloseTo(Math.SQRT1_2, 2);
  });

  it("lets nothing fold back from above the wire's band", () => {
    const out = feed(new Resampler(48_000, RATE), tone(15_000, 48_000, 0.5));
    expect(rms(out.subarray(1_000, 11_000))).toBeLessThan(0.005);
  });

  it("passes sound of the same rate as it is", () => {
    const samples = tone(440, RATE, 0.01);
    expect([...new Resampler(RATE, RATE).feed(samples)]).toEqual([...samples]);
  });
});

describe("the wire", () => {
  it("carries samples in 16 bits and clips what is too loud", () => {
    expect([...fromBase64(toBase64(Float32Array.from([0, 0.5, -0.25, 2, -2])))]).toEqual([0, 0.5, -0.25, 32_767 / 32_768, -1]);
    expect(toBase64(Float32Array.from([1 / 32_768]))).toBe("AQA="); // little-endian
  });

  it("reads events, skips what it does not know, and refuses what is none", () => {
    expect(readEvent('{"type":"input_audio_buffer.speech_started","server_event_seq":7,"audio_start_ms":330,"item_id":"i"}'))
      .toEqual({ seq: 7, event: { kind: "heard", itemId: "i", startMs: 330 } });
    expect(readEvent('{"type":"something.new"}')).toEqual({ seq: 0, event: null });
    for (const text of ["[]", "null", '{"type":3}', "{", '{"type":"session.resumable"}']) expect(() => readEvent(text)).toThrow();
  });

  it("finds the padding of the turn detection and the items of an answer", () => {
    const session = { audio: { input: { turn_detection: { prefix_padding_ms: 300 } } } };
    expect(readEvent(JSON.stringify({ type: "session.updated", session })).event).toEqual({ kind: "updated", paddingMs: 300 });
    const response = { id: "r", status: "cancelled", output: [{ type: "function_call", id: "f" }, { type: "message", id: "m" }] };
    expect(readEvent(JSON.stringify({ type: "response.done", response })).event)
      .toEqual({ kind: "answered", responseId: "r", status: "cancelled", itemIds: ["m"] });
  });
});

describe("the delays", () => {
  const LOUD = 0.1;

  it("counts first audio from the user's last loud packet", () => {
    const timing = new Timing();
    for (let i = 1; i <= 50; i++) timing.packet(1_000 + 20 * i, 20, i <= 30 ? LOUD : 0.001);
    timing.userEnded(2_000);
    timing.sounds(2_250);
    expect(timing.firstAudioMs).toBe(650); // loud until 1,600
    timing.sounds(5_000); // it was answered already
    expect(timing.firstAudioMs).toBe(650);
  });

  it("counts barge-in from the position where the speech began to the silence", () => {
    const timing = new Timing();
    for (let i = 1; i <= 100; i++) timing.packet(20 * i, 20, 0); // position and time are the same here
    timing.userBegan(1_800, true);
    timing.stopped(2_030);
    expect(timing.bargeInMs).toBe(230);
  });

  it("counts none where the voice was silent, and none that comes much later", () => {
    const timing = new Timing();
    timing.packet(20, 20, 0);
    timing.userBegan(0, false);
    timing.stopped(40);
    timing.interrupts(100, true);
    timing.stopped(9_000);
    expect(timing.bargeInMs).toBeNull();
  });
});

describe("the captions", () => {
  it("keep the user's line where the speech began, though its words come later", () => {
    const captions = new Captions();
    captions.begin("u", "user");
    captions.words("v", "voice", "Hello");
    captions.words("v", "voice", " there");
    captions.userSaid("u", " Good morning. ");
    expect(captions.lines.map(({ text }) => text)).toEqual(["Good morning.", "Hello there"]);
  });

  it("strike out what was not heard", () => {
    const captions = new Captions();
    captions.words("v", "voice", "Once upon a time");
    captions.heard("v", "Once upon");
    expect(captions.lines[0]).toMatchObject({ text: "Once upon", unheard: " a time", done: true });
  });

  it("forget a noise, and the oldest lines of a long talk", () => {
    const captions = new Captions();
    captions.begin("u", "user");
    captions.userSaid("u", "");
    expect(captions.lines).toEqual([]);
    for (let i = 0; i < 250; i++) captions.words(`v${i}`, "voice", "x");
    expect(captions.lines).toHaveLength(200);
    expect(captions.lines[0]!.id).toBe("v50");
  });
});
