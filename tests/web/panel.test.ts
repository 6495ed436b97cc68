import { promptOf, stemOf } from "@page/panel";

const PROMPTS = ["A snowy valley with log cabins", "Sandstone ruins in the desert", "A garden in the snow at night"];

describe("a start picture", () => {
  it("is named after its place", () => {
    expect(["snow-1", "lava_12", "old-town-3", "noon"].map(stemOf)).toEqual(["snow", "lava", "old town", "noon"]);
  });

  it("brings the one prompt that speaks of it", () => expect(promptOf("desert-2", PROMPTS)).toBe(PROMPTS[1]));
  it("brings none when several do", () => expect(promptOf("snow-1", PROMPTS)).toBe(null));
  it("brings none when none does", () => expect(promptOf("city-1", PROMPTS)).toBe(null));
});
