import { LatencyMeter, RateMeter } from "@page/meters";
import { Pacer } from "@page/pacer";

const REFRESH_MS = 1000 / 60;
const UNEVEN_MS = 2 * REFRESH_MS + 1; // a picture can only be shown at a refresh

/** Plays blocks that arrive at given times on a 60 Hz screen with a fake clock; gives the times at which frames are shown. */
function play(pacer: Pacer, arrivals: number[], framesPerBlock: number, untilMs: number) {
  const shown: number[] = [];
  let waiting = 0;
  let next = 0;
  let mostWaiting = 0;
  for (let now = 0; now < untilMs; now += REFRESH_MS) {
    while (next < arrivals.length && arrivals[next]! <= now) {
      pacer.blockArrived(arrivals[next]!);
      waiting += framesPerBlock;
      next += 1;
    }
    mostWaiting = Math.max(mostWaiting, waiting);
    if (waiting > 0 && pacer.isDue(now)) {
      waiting -= 1;
      shown.push(now);
      pacer.shown(now, waiting);
    }
  }
  return { shown, waiting, mostWaiting };
}

const gaps = (times: number[]) => times.slice(1).map((time, i) => time - times[i]!);
const blocks = (count: number, everyMs: number, jitter: (i: number) => number = () => 0) =>
  Array.from({ length: count }, (_, i) => i * everyMs + jitter(i));

describe("the pacer", () => {
  it("shows the first frame of all at once", () => {
    const { shown } = play(new Pacer(10, 3), [0], 3, 50);
    expect(shown).toEqual([0]);
  });

  it("spreads a block that arrives at once over its time", () => {
    const { shown } = play(new Pacer(10, 3), blocks(20, 300), 3, 6_000);
    expect(shown).toHaveLength(60);
    for (const gap of gaps(shown)) expect(Math.abs(gap - 100)).toBeLessThanOrEqual(UNEVEN_MS);
  });

  it("takes the speed that a slow server really has, and stays even", () => {
    const { shown } = play(new Pacer(12, 3), blocks(40, 400), 3, 16_000); // 7.5 instead of 12 a second
    const late = gaps(shown).slice(12);
    for (const gap of late) expect(Math.abs(gap - 133.3)).toBeLessThanOrEqual(UNEVEN_MS);
  });

  it("stays within two blocks in hand when blocks arrive unevenly", () => {
    const { shown, mostWaiting } = play(new Pacer(10, 3), blocks(60, 300, (i) => (i % 3) * 60), 3, 18_500);
    expect(shown).toHaveLength(180);
    expect(mostWaiting).toBeLessThanOrEqual(6);
  });

  it("catches up after a burst, without dropping a frame", () => {
    const arrivals = [0, 300, 310, 320, ...blocks(20, 300).map((time) => time + 1_200)];
    const { shown, waiting } = play(new Pacer(10, 3), arrivals, 3, 7_500);
    expect(shown).toHaveLength(arrivals.length * 3);
    expect(waiting).toBe(0);
    const last = shown.at(-1)! - (arrivals.at(-1)! + 200);
    expect(last).toBeLessThan(400); // at most about a block behind the live edge
  });

  it("shows a frame that comes late at once, and takes the new beat from there", () => {
    const pacer = new Pacer(10, 1);
    pacer.shown(0, 0);
    expect(pacer.isDue(50)).toBe(false);
    expect(pacer.isDue(100)).toBe(true);
    pacer.shown(180, 0);
    expect(pacer.isDue(260)).toBe(false);
    expect(pacer.isDue(280)).toBe(true);
  });

  it("does not take a pause for a slow server", () => {
    const pacer = new Pacer(10, 3);
    for (const at of [0, 300, 600, 60_600, 60_900]) pacer.blockArrived(at);
    expect(pacer.periodMs(0)).toBeCloseTo(100, 0);
  });

  it("forgets its beat, not its speed, at a restart", () => {
    const pacer = new Pacer(10, 3);
    for (let i = 0; i < 60; i += 1) pacer.blockArrived(i * 600);
    pacer.shown(36_000, 0);
    pacer.restart();
    expect(pacer.isDue(36_001)).toBe(true);
    expect(pacer.periodMs(0)).toBeCloseTo(200, 0);
  });
});

describe("key to photon", () => {
  it("ends at the first frame that reflects the event", () => {
    const meter = new LatencyMeter();
    meter.sent(4, 1_000);
    meter.shown(null, 1_100);
    meter.shown(3, 1_200);
    expect(meter.last).toBe(null);
    meter.shown(4, 1_350);
    expect(meter.last).toBe(350);
  });

  it("counts every event that one frame reflects, and each once", () => {
    const meter = new LatencyMeter();
    meter.sent(1, 0);
    meter.sent(2, 100);
    meter.sent(3, 150);
    meter.shown(2, 300);
    meter.shown(2, 400);
    expect(meter.median).toBe(200);
    meter.shown(3, 450);
    expect(meter.median).toBe(300);
  });

  it("forgets what a lost connection will not answer", () => {
    const meter = new LatencyMeter();
    meter.sent(1, 0);
    meter.forget();
    meter.shown(5, 9_000);
    expect(meter.last).toBe(null);
  });
});

describe("a rate", () => {
  it("is taken over a sliding window", () => {
    const meter = new RateMeter(1_000);
    for (let now = 0; now <= 3_000; now += 100) meter.add(now);
    expect(meter.perSecond(3_000)).toBeCloseTo(10, 0);
    expect(meter.perSecond(9_000)).toBe(0);
  });
});
