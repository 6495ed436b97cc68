import { readFileSync } from "node:fs";
import { CODES as TEXTS } from "@page/messages";
import {
  encodeMessage, keySubprotocol, parseFrame, parseMessage, ProtocolError, type ClientMessage, type Frame,
} from "@page/protocol";

interface Vector {
  name: string; direction: "c2s" | "s2c"; kind: "text" | "binary"; wire?: string | [string, number][]; wire_hex?: string;
  expect: {
    message?: Record<string, unknown>; header?: Record<string, unknown>; payload?: string;
    error?: { code: string; path: string };
  };
}

const read = (path: string) => readFileSync(new URL(`../../protocols/${path}`, import.meta.url), "utf8");
const vectors = (file: string) => JSON.parse(read(`vectors/world/${file}.json`)) as Vector[];
const texts = [...vectors("server_messages"), ...vectors("client_messages"), ...vectors("client_refused")];
const ofServer = texts.filter(({ direction, kind }) => direction === "s2c" && kind === "text");
const ofClient = texts.filter(({ direction, kind, expect }) => direction === "c2s" && kind === "text" && expect.message);
const named = (list: Vector[]): [string, Vector][] => list.map((vector) => [vector.name, vector]);

/** The vectors' normal form: members that are null are left out where the field is optional, and so is the default cadence. */
function normal(value: object, wanted: Record<string, unknown>): Record<string, unknown> {
  return Object.fromEntries(
    Object.entries(value).filter(([key, member]) => (member !== null || key in wanted) && !(key === "cadence" && member === "paced" && !(key in wanted))),
  );
}

/** A WebSocket gives text only when it is UTF-8; the browser closes the connection otherwise. */
function textOf({ wire, wire_hex }: Vector): string {
  if (typeof wire === "string") return wire;
  return wire?.map(([piece, times]) => piece.repeat(times)).join("") ?? new TextDecoder("utf-8", { fatal: true }).decode(Buffer.from(wire_hex!, "hex"));
}

function refusal(parse: () => unknown): ProtocolError {
  try {
    parse();
  } catch (error) {
    if (error instanceof ProtocolError) return error;
    if (error instanceof TypeError) return new ProtocolError("not UTF-8");
    throw error;
  }
  throw new Error("was accepted");
}

describe("server messages parse as the vectors say", () => {
  it.each(named(ofServer.filter(({ expect }) => expect.message)))("%s", (_, vector) => {
    const message = parseMessage(textOf(vector)) as unknown as Record<string, unknown>;
    expect(normal(message, vector.expect.message!)).toEqual(withoutRe(vector.expect.message!, message));
  });

  it("in some number", () => expect(ofServer.length).toBeGreaterThan(20));
});

/** `re` ties answers to messages with an `id`; the page sends none and drops it. */
function withoutRe(wanted: Record<string, unknown>, parsed: Record<string, unknown>): Record<string, unknown> {
  return "re" in parsed ? wanted : Object.fromEntries(Object.entries(wanted).filter(([key]) => key !== "re"));
}

describe("server messages are refused as the vectors say", () => {
  it.each(named(ofServer.filter(({ expect }) => expect.error)))("%s", (_, vector) => {
    const error = refusal(() => parseMessage(textOf(vector)));
    expect(error.code).toBe(vector.expect.error!.code);
    expect(vector.expect.error!.path.startsWith(error.path), `${error.path} for ${vector.expect.error!.path}`).toBe(true);
  });
});

describe("client messages are written as the vectors say", () => {
  it.each(named(ofClient))("%s", (_, vector) => {
    const text = encodeMessage(vector.expect.message as unknown as ClientMessage);
    const wire = JSON.parse(textOf(vector)) as object;
    expect(normal(JSON.parse(text) as object, {})).toEqual(normal(wire, {}));
  });
});

describe("frames parse as the vectors say", () => {
  const header = (frame: Frame) => ({
    format: frame.format, key: frame.key, last: frame.last, replay: frame.replay, index: frame.index, seq: frame.seq,
    epoch: frame.epoch, chunk_index: frame.chunkIndex, frame: frame.frame, applied_event_id: frame.appliedEventId,
    pts_ms: frame.ptsMs, payload_bytes: frame.payload.length,
  });
  const bytesOf = (vector: Vector) => Uint8Array.from(Buffer.from(vector.wire as string, "hex")).buffer;

  it.each(named(vectors("frames")))("%s", (_, vector) => {
    if (vector.expect.error) {
      expect(refusal(() => parseFrame(bytesOf(vector)))).toMatchObject(vector.expect.error);
      return;
    }
    const frame = parseFrame(bytesOf(vector));
    expect(header(frame)).toEqual(vector.expect.header);
    expect(Buffer.from(frame.payload).toString("hex")).toBe(vector.expect.payload);
  });
});

describe("the strict door", () => {
  it.each([
    ["a key that comes twice", '{"type":"pong","server_ms":1,"server_ms":2}'],
    ["a key that comes twice deep inside", '{"type":"pong","server_ms":1,"x":[{"a":1,"b":{},"a":2}]}'],
    ["a lone surrogate", '{"type":"error","code":"internal","message":"\\ud800","fatal":false}'],
    ["an integer written as a real", '{"type":"session.paused","seq":1.0}'],
    ["an integer beyond 2^53", '{"type":"session.paused","seq":9007199254740993}'],
    ["a number beyond a double", '{"type":"pong","server_ms":1e999}'],
    ["deep nesting", `{"type":"pong","server_ms":1,"x":${"[".repeat(40)}${"]".repeat(40)}}`],
    ["a list", "[]"], ["a number", "7"], ["nothing", ""], ["an unknown type", '{"type":"toString"}'],
  ])("refuses %s", (_, text) => expect(refusal(() => parseMessage(text)).code).toBe("bad_message"));

  it("takes the same names in different objects, and strings that look like syntax", () => {
    const message = '{"type":"error","code":"internal","message":"{\\"type\\":[1.0,]}","fatal":false,"path":"$.type"}';
    expect(parseMessage(message)).toMatchObject({ message: '{"type":[1.0,]}', fatal: false });
  });
});

describe("the key subprotocol", () => {
  it("is base64url without padding", () => {
    expect(keySubprotocol("secret")).toBe("realtime-omni.key.c2VjcmV0");
    expect(keySubprotocol("ÿ?>")).toBe("realtime-omni.key.w78_Pg");
    expect(keySubprotocol("a")).toBe("realtime-omni.key.YQ");
  });
});

describe("every code of the protocol", () => {
  const section = read("world.md").split("## 8. Error codes")[1]!.split("The list is closed")[0]!;
  it.each([...section.matchAll(/`([a-z_]+)`/g)].map((match) => match[1]!))("has a sentence: %s", (code) => {
    expect(TEXTS[code]?.text).toMatch(/^[A-Z].*[.)]$/);
  });
});
