import { promptOf, seedOf, stemOf } from "@page/panel";

const PROMPTS = ["A snowy valley with log cabins", "Sandstone ruins in the desert", "A garden in the snow at night"];

describe("a start picture", () => {
  it("is named after its place", () => {
    expect(["snow-1", "lava_12", "old-town-3", "noon"].map(stemOf)).toEqual(["snow", "lava", "old town", "noon"]);
  });

  it("brings the one prompt that speaks of it", () => expect(promptOf("desert-2", PROMPTS)).toBe(PROMPTS[1]));
  it("brings none when several do", () => expect(promptOf("snow-1", PROMPTS)).toBe(null));
  it("brings none when none does", () => expect(promptOf("city-1", PROMPTS)).toBe(null));
});

describe("a seed", () => {
  it("is a whole number that a double holds exactly", () => {
    expect(["0", " 42 ", "9007199254740991"].map(seedOf)).toEqual([0, 42, Number.MAX_SAFE_INTEGER]);
  });

  it("is any when nothing is typed", () => expect(seedOf("  ")).toBe(undefined));

  it("is nothing else", () => {
    expect(["abc", "-1", "1.5", "1e3", "9007199254740992", "0x10"].map(seedOf)).toEqual(Array(6).fill(null));
  });
});
