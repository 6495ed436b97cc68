// The world protocol, version 1, as values: messages, binary frames and their parsers. See protocols/world.md.
// Knows no socket, clock or DOM. Invariant: what leaves parse* has the fields and types that this file declares;
// anything else is a ProtocolError with the protocol's code and path. As strict as the server is.

import {
  bool, increasing, int, list, MAX_INTEGER, nullable, num, object, oneOf, parseStrict, ProtocolError, record, str,
  type Table,
} from "./checks";

export { ProtocolError } from "./checks";

export const SUBPROTOCOL = "realtime-omni.world.v1";
export const HELD_KEYS_SCHEMA = "realtime_omni.held_keys.v1";

export type Format = "h264" | "jpeg" | "rgb24" | "latent";
export type FailureAction = "rollback" | "reset" | "close";

export interface Control { track: string; schema: string; data: unknown }
export interface ControlSpec { track: string; schema: string; json_schema: unknown; description: string }
export interface HeldKeys { keys: string[]; t_ms: number }

export type ClientMessage =
  | { type: "session.start"; id?: string; model?: string; session_id?: string; prompt?: string; seed?: number;
      image?: string; start?: string; format: Format; fps?: number; cadence?: "paced" | "on_demand"; lead_frames?: number }
  | { type: "session.resume"; id?: string; session_id: string; resume_token: string; last_seq: number; format?: Format;
      takeover?: boolean }
  | { type: "session.event"; id?: string; event_id: number; prompt?: string; controls?: Control[] }
  | { type: "session.ack"; id?: string; seq: number; displayed: number; epoch: number }
  | { type: "session.reset"; id?: string; prompt?: string; seed?: number; image?: string; start?: string }
  | { type: "session.fork"; id?: string; session_id?: string }
  | { type: "session.rewind"; id?: string; chunk_index: number }
  | { type: "session.log"; id?: string }
  | { type: "session.replay"; id?: string; log: string }
  | { type: "session.next" | "session.pause" | "session.resume_play" | "session.abort" | "session.rollback" | "session.close";
      id?: string }
  | { type: "ping"; id?: string; t?: number };

export interface Limits {
  max_pending_events: number; max_message_bytes: number; max_events_per_s: number; grace_s: number;
  stall_timeout_s: number; horizon_frames: number | null;
}

export interface Hello {
  type: "hello"; protocol: string; server: string; models: string[]; handshake_timeout_s: number;
}
export interface Started {
  type: "session.started"; seq: number; re?: string; session_id: string; resume_token: string; model: string; prompt: string | null;
  seed: number; format: Format; codec: string | null; width: number; height: number; fps: number;
  frames_per_block: number; cadence: string; lead_frames: number; limits: Limits; controls: ControlSpec[];
  prompts: string[]; starts: string[]; next_event_id: number; can_fork: boolean; oldest_rewind: number | null;
}
export interface Resumed {
  type: "session.resumed"; session_id: string; resume_token: string; replayed_from: number; state: "playing" | "paused" | "failed";
  epoch: number; next_frame: number; next_event_id: number; format: Format; codec: string | null;
}
export interface Accepted {
  type: "event.accepted"; seq: number; event_id: number; status: string; pending: number; prompt?: string | null;
}
export interface Applied {
  type: "event.applied"; seq: number; event_ids: number[]; chunk_index: number; first_frame: number;
}
export interface Discarded { type: "event.discarded"; seq: number; event_ids: number[]; reason: string }
export interface Timings { tick: number; encode: number; wait: number }
export interface Kv { pages_used: number; pages_total: number }
export interface Chunk {
  type: "chunk"; seq: number; epoch: number; chunk_index: number; first_frame: number; frames: number;
  applied_event_ids: number[]; prompt: string | null; timings_ms: Timings; kv: Kv; oldest_rewind: number | null; latent_shape?: number[];
}
export interface ChunkAborted { type: "chunk.aborted"; seq: number; chunk_index: number | null }
export interface Paused { type: "session.paused" | "session.playing"; seq: number }
export interface ResetDone { type: "session.reset_done"; seq: number; re?: string; epoch: number; prompt: string | null; seed: number }
export interface Forked {
  type: "session.forked"; seq: number; session_id: string; resume_token: string; grace_s: number; epoch: number; chunk_index: number;
  next_frame: number; prompt: string | null; seed: number; next_event_id: number; oldest_rewind: number | null;
}
export interface Rewound {
  type: "session.rewound"; seq: number; epoch: number; chunk_index: number; next_frame: number; prompt: string | null;
  oldest_rewind: number | null;
}
export interface Logged { type: "session.logged"; log: string }
export interface Replaying { type: "session.replaying"; seq: number; chunk_index: number; chunks: number }
export interface Replayed { type: "session.replayed"; seq: number; complete: boolean; next_event_id: number }
export interface Failed {
  type: "session.failed"; seq: number; code: string; message: string; chunk_index: number | null; can: FailureAction[];
}
export interface Recovered { type: "session.recovered"; seq: number; chunk_index: number }
export interface Closed { type: "session.closed"; seq?: number; reason: string; code?: string | null; message?: string | null }
export interface Pong { type: "pong"; t?: number | null; server_ms: number }
export interface ServerError {
  type: "error"; code: string; message: string; path?: string | null; event_id?: number | null; re?: string | null;
  fatal: boolean;
}

export type ConnectionMessage = Hello | Pong | ServerError | Resumed | Logged;
export type SessionMessage =
  | Started | Accepted | Applied | Discarded | Chunk | ChunkAborted | Paused | ResetDone | Forked | Rewound | Replaying | Replayed | Failed | Recovered | Closed;
export type ServerMessage = ConnectionMessage | SessionMessage;

// ---------------------------------------------------------------------------------------------------- field tables

const CODES = [
  "bad_message", "unsupported_version", "unsupported_format", "model_unknown", "prompt_unknown", "control_invalid", "schema_unknown",
  "image_invalid", "invalid_argument", "event_conflict", "stale", "queue_full", "session_exists", "session_not_found", "session_gone",
  "session_busy", "session_state", "session_failed", "tick_failed", "aborted", "horizon", "not_retained", "unsupported", "capacity", "unauthorized", "origin_refused",
  "rate_limited", "message_too_large", "handshake_timeout", "stalled", "resume_refused", "shutdown", "internal",
];
const U32 = 2 ** 32 - 1;
const seq = int(1);
const u32 = int(0, U32);
const name = str(1, 128);
const text = str(0, 4_000);
const prompt = str(1, 2_000, /\S/);
const token = str(1, 256);
const sessionId = str(1, 64, /^[A-Za-z0-9._-]+$/);
const code = oneOf(CODES);
const format = oneOf(["h264", "jpeg", "rgb24", "latent"], "unsupported_format");
const seconds = num(0, 1e9);
const ms = num(0, 1e12);
const pixels = int(1, 16_384);
const frames = int(1, 255);
const limits = record({
  max_pending_events: int(), max_message_bytes: int(), max_events_per_s: num(0, 1e6, { above: true }), grace_s: seconds,
  stall_timeout_s: seconds, horizon_frames: nullable(int()),
});
const controlSpec = record({ track: name, schema: name, json_schema: object, description: text });
const eventIds = increasing(list(int(), 1, 4_096));

const TABLES: Record<ServerMessage["type"], Table> = {
  hello: { protocol: oneOf([SUBPROTOCOL], "unsupported_version"), server: text, models: list(name), handshake_timeout_s: seconds },
  pong: { "t?": num(), server_ms: ms },
  error: { code, message: text, "path?": text, "event_id?": int(), fatal: bool },
  "session.resumed": {
    session_id: sessionId, resume_token: token, replayed_from: seq, state: oneOf(["playing", "paused", "failed"]), epoch: u32,
    next_frame: int(), next_event_id: int(0, MAX_INTEGER + 1), format, codec: nullable(name),
  },
  "session.started": {
    seq, session_id: sessionId, resume_token: token, model: name, prompt: nullable(prompt), seed: int(), format,
    codec: nullable(name), width: pixels, height: pixels, fps: num(0, 240, { above: true }), frames_per_block: frames,
    cadence: oneOf(["paced", "on_demand"]), lead_frames: int(), limits, controls: list(controlSpec), prompts: list(prompt),
    starts: list(name), next_event_id: int(0, MAX_INTEGER + 1), can_fork: bool, oldest_rewind: nullable(u32),
  },
  "event.accepted": {
    seq, event_id: int(), status: oneOf(["accepted", "duplicate", "discarded"]), pending: int(), "prompt?": prompt,
  },
  "event.applied": { seq, event_ids: eventIds, chunk_index: u32, first_frame: int() },
  "event.discarded": { seq, event_ids: eventIds, reason: oneOf(["reset", "rewind", "closed"]) },
  chunk: {
    seq, epoch: u32, chunk_index: u32, first_frame: int(), frames, applied_event_ids: increasing(list(int(), 0, 4_096)),
    prompt: nullable(prompt), timings_ms: record({ tick: ms, encode: ms, wait: ms }),
    kv: record({ pages_used: int(), pages_total: int() }), oldest_rewind: nullable(u32), "latent_shape?": list(pixels, 1, 8),
  },
  "chunk.aborted": { seq, chunk_index: nullable(u32) },
  "session.paused": { seq },
  "session.playing": { seq },
  "session.reset_done": { seq, epoch: u32, prompt: nullable(prompt), seed: int() },
  "session.forked": {
    seq, session_id: sessionId, resume_token: token, grace_s: seconds, epoch: u32, chunk_index: u32, next_frame: int(),
    prompt: nullable(prompt), seed: int(), next_event_id: int(0, MAX_INTEGER + 1), oldest_rewind: nullable(u32),
  },
  "session.rewound": {
    seq, epoch: u32, chunk_index: u32, next_frame: int(), prompt: nullable(prompt), oldest_rewind: nullable(u32),
  },
  "session.logged": { log: str(1, 4 * 1024 * 1024 - 1024) },
  "session.replaying": { seq, chunk_index: u32, chunks: seq },
  "session.replayed": { seq, complete: bool, next_event_id: int(0, MAX_INTEGER + 1) },
  "session.failed": { seq, code, message: text, chunk_index: u32, can: list(oneOf(["rollback", "reset", "close"])) },
  "session.recovered": { seq, chunk_index: u32 },
  "session.closed": {
    "seq?": seq,
    reason: oneOf(["client", "detached_expired", "stalled", "evicted", "shutdown", "failed", "taken_over", "operator"]),
    "code?": code, "message?": text,
  },
};
const PARSERS = new Map(
  Object.entries(TABLES).map(([type, table]) => [type, record({ ...table, "re?": str(1, 64) }, ["type"])]),
);

/** One text frame of the server as a message. Throws ProtocolError. */
export function parseMessage(text: string): ServerMessage {
  const { value, reals } = parseStrict(text);
  const type = (object(value, "$", reals) as { type?: unknown }).type;
  const parser = typeof type === "string" ? PARSERS.get(type) : undefined;
  if (!parser) throw new ProtocolError("unknown message type", "$.type");
  const message = { type, ...(parser(value, "$", reals) as object) } as ServerMessage;
  if (message.type === "session.closed" && (message.seq === undefined) !== (message.reason === "taken_over")) {
    throw new ProtocolError("numbered unless taken over", "$.seq");
  }
  return message;
}

/** One client message as a text frame; fields that are undefined are left out. */
export function encodeMessage(message: ClientMessage): string {
  return JSON.stringify(message);
}

/** The message's place in the session's numbering; null for what is said about the connection. */
export function seqOf(message: ServerMessage): number | null {
  return "seq" in message && message.seq !== undefined ? message.seq : null;
}

// ---------------------------------------------------------------------------------------------------- binary frames

export const FRAME_MAGIC = 0x4f52;
export const FRAME_HEADER_BYTES = 48;
const MAX_HEADER_BYTES = 1_024; // a later header may be longer, within reason
const FORMATS: Record<number, Format> = { 1: "h264", 2: "jpeg", 3: "rgb24", 4: "latent" };
const NO_EVENT = 0xffff_ffff_ffff_ffffn;

export interface Frame {
  format: Format; key: boolean; last: boolean; replay: boolean; index: number; seq: number; epoch: number; chunkIndex: number;
  frame: number; appliedEventId: number | null; ptsMs: number; payload: Uint8Array;
}

function counter(value: bigint, path: string, low = 0n): number {
  if (value < low || value > BigInt(MAX_INTEGER)) throw new ProtocolError("out of range", path);
  return Number(value);
}

/** One binary frame of the server; the payload is a view, not a copy. Throws ProtocolError. */
export function parseFrame(bytes: ArrayBuffer): Frame {
  if (bytes.byteLength < FRAME_HEADER_BYTES) throw new ProtocolError("shorter than its header");
  const view = new DataView(bytes);
  if (view.getUint16(0, true) !== FRAME_MAGIC) throw new ProtocolError("not a frame", "$.magic");
  if (view.getUint8(2) !== 1) throw new ProtocolError("unknown version", "$.version", "unsupported_version");
  const format = FORMATS[view.getUint8(3)];
  if (!format) throw new ProtocolError("unknown format", "$.format", "unsupported_format");
  const flags = view.getUint8(4);
  if (flags > 7) throw new ProtocolError("a reserved flag is set", "$.flags");
  const headerBytes = view.getUint16(6, true);
  if (headerBytes < FRAME_HEADER_BYTES || headerBytes > MAX_HEADER_BYTES) throw new ProtocolError("out of range", "$.header_bytes");
  const applied = view.getBigUint64(32, true);
  const seqNumber = counter(view.getBigUint64(8, true), "$.seq", 1n);
  const frame = counter(view.getBigUint64(24, true), "$.frame");
  const appliedEventId = applied === NO_EVENT ? null : counter(applied, "$.applied_event_id");
  const payloadBytes = view.getUint32(44, true);
  if (payloadBytes === 0 || headerBytes + payloadBytes !== bytes.byteLength) throw new ProtocolError("wrong length", "$.payload_bytes");
  return {
    format, key: (flags & 1) !== 0, last: (flags & 2) !== 0, replay: (flags & 4) !== 0, index: view.getUint8(5), seq: seqNumber,
    epoch: view.getUint32(16, true), chunkIndex: view.getUint32(20, true), frame, appliedEventId,
    ptsMs: view.getUint32(40, true), payload: new Uint8Array(bytes, headerBytes),
  };
}

/** The extra WebSocket subprotocol that carries an API key: base64url without padding, which a token may hold. */
export function keySubprotocol(key: string): string {
  const bytes = new TextEncoder().encode(key);
  const base64 = btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
  return `realtime-omni.key.${base64.replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "")}`;
}
