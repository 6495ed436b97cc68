import type { WorldKey } from "@page/held";
import { Steering, stepOf, TOOLS } from "@page/steering";

describe("a tool that a voice calls", () => {
  it("means keys for a time, a stop, or a place", () => {
    expect(stepOf("move", '{"direction":"forward"}')).toMatchObject({ kind: "hold", slot: "walk", keys: ["w"] });
    const turn = stepOf("turn", '{"direction":"left"}');
    const little = stepOf("turn", '{"direction":"left","amount":"a little"}');
    expect(turn).toMatchObject({ kind: "hold", slot: "turn", keys: ["j"] });
    expect((little as { ms: number }).ms).toBeLessThan((turn as { ms: number }).ms);
    expect(stepOf("halt", "{}")).toEqual({ kind: "halt" });
    expect(stepOf("set_scene", '{"scene":" night "}')).toEqual({ kind: "place", prompt: "night" });
  });

  it("means nothing when it was not offered or its arguments are of no use", () => {
    const useless = [
      ["move", '{"direction":"toString"}'], ["move", "{}"], ["turn", "left"], ["turn", "null"], ["set_scene", '{"scene":""}'],
      ["set_scene", '{"scene":7}'], ["instruct_robot", '{"instruction":"go"}'], ["__proto__", "{}"],
    ];
    for (const [name, args] of useless) expect(stepOf(name!, args!)).toBeNull();
  });

  it("is declared with every value that it takes", () => {
    for (const { name, parameters } of TOOLS) {
      const { direction } = parameters.properties as { direction?: { enum: string[] } };
      for (const value of direction?.enum ?? []) expect(stepOf(name, JSON.stringify({ direction: value }))).not.toBeNull();
    }
  });
});

describe("what a voice holds", () => {
  const steering = () => {
    const held = new Map<string, readonly WorldKey[]>();
    const timers = new Map<number, () => void>();
    let next = 0;
    const made = new Steering({
      hold: (keys, source) => void (keys.length > 0 ? held.set(source, keys) : held.delete(source)),
      after: (run) => (timers.set(++next, run), next),
      cancel: (timer) => void timers.delete(timer),
    });
    const take = (name: string, args: object) => made.take(stepOf(name, JSON.stringify(args)) as never);
    const pass = () => [...timers.values()].forEach((run) => run());
    return { made, take, pass, timers, keys: () => [...held.values()].flat().sort() };
  };

  it("ends with its time", () => {
    const { take, pass, keys, timers } = steering();
    take("turn", { direction: "left" });
    expect(keys()).toEqual(["j"]);
    pass();
    expect(keys()).toEqual([]);
    expect(timers.size).toBe(0);
  });

  it("is replaced by the next of its kind; one can walk and turn at once", () => {
    const { take, keys, timers } = steering();
    take("move", { direction: "forward" });
    take("turn", { direction: "right" });
    expect(keys()).toEqual(["l", "w"]);
    take("move", { direction: "back" });
    expect(keys()).toEqual(["l", "s"]);
    expect(timers.size).toBe(2);
    take("halt", {});
    expect(keys()).toEqual([]);
    expect(timers.size).toBe(0);
  });
});
