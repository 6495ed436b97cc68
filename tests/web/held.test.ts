import { HeldKeys, keyOf, stickKeys } from "@page/held";

describe("held keys", () => {
  it("say that the set has changed only when it has", () => {
    const held = new HeldKeys();
    expect(held.press("w", "KeyW")).toBe(true);
    expect(held.press("w", "KeyW")).toBe(false); // a repeat
    expect(held.release("w", "KeyW")).toBe(true);
    expect(held.release("w", "KeyW")).toBe(false);
  });

  it("hold a key as long as one of its sources does", () => {
    const held = new HeldKeys();
    held.press("l", "KeyL");
    expect(held.press("l", "ArrowRight")).toBe(false);
    expect(held.release("l", "KeyL")).toBe(false);
    expect(held.keys()).toEqual(["l"]);
    expect(held.release("l", "ArrowRight")).toBe(true);
    expect(held.keys()).toEqual([]);
  });

  it("come in one order, whatever order they were pressed in", () => {
    const held = new HeldKeys();
    for (const key of ["l", "d", "w"] as const) held.press(key, key);
    expect(held.keys()).toEqual(["w", "d", "l"]);
  });

  it("are all let go at once", () => {
    const held = new HeldKeys();
    held.press("w", "KeyW");
    held.press("j", "pointer 7");
    expect(held.releaseAll()).toBe(true);
    expect(held.keys()).toEqual([]);
    expect(held.releaseAll()).toBe(false);
    expect(held.release("w", "KeyW")).toBe(false); // the late keyup after a blur
  });

  it("let a drag replace what it held, and nothing else", () => {
    const held = new HeldKeys();
    held.press("w", "KeyW");
    expect(held.hold(["l"], "drag")).toBe(true);
    expect(held.hold(["l"], "drag")).toBe(false);
    expect(held.hold(["j", "i"], "drag")).toBe(true);
    expect(held.keys()).toEqual(["w", "i", "j"]);
    expect(held.hold([], "drag")).toBe(true);
    expect(held.keys()).toEqual(["w"]);
  });
});

describe("the key of a keyboard event", () => {
  it("is where the key is, not what is printed on it", () => {
    expect(keyOf({ code: "KeyW", key: "z" })).toBe("w"); // AZERTY
    expect(keyOf({ code: "KeyZ", key: "w" })).toBe(null);
  });

  it("is a turn or a look for the arrows", () => {
    const codes = ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"];
    expect(codes.map((code) => keyOf({ code, key: code }))).toEqual(["j", "l", "i", "k"]);
  });

  it("is the letter when a virtual keyboard gives no code", () => {
    expect(keyOf({ code: "", key: "D" })).toBe("d");
    expect(keyOf({ code: "", key: "x" })).toBe(null);
  });
});

describe("a drag", () => {
  it("does nothing near its origin", () => expect(stickKeys(20, -20)).toEqual([]));
  it("turns towards its side", () => {
    expect(stickKeys(-60, 5)).toEqual(["j"]);
    expect(stickKeys(60, -5)).toEqual(["l"]);
  });
  it("looks up and down", () => {
    expect(stickKeys(5, -60)).toEqual(["i"]);
    expect(stickKeys(-5, 60)).toEqual(["k"]);
  });
  it("does both on the diagonal", () => expect(stickKeys(60, -60)).toEqual(["l", "i"]));
});
