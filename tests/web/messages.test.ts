import { CODES, explain } from "@page/messages";

describe("an error in one line", () => {
  it("is the sentence of its code", () => expect(explain("horizon", "")).toBe(CODES.horizon!.text));

  it("has the server's words in brackets, and one full stop", () => {
    expect(explain("prompt_unknown", "this world knows lava cave.")).toBe(
      "The model does not know this place (this world knows lava cave).",
    );
  });

  it("names a code that the page does not know", () => expect(explain("new_code", "")).toBe("The server reported “new_code”."));
});
