// What a voice server says, as far as the page uses it: OpenAI's Realtime events in the duplex dialect (protocols/realtime.md). Pure.
// Events that the page does not know are skipped: the protocol may grow.

export type VoiceEvent =
  | { kind: "created"; sessionId: string; model: string }
  | { kind: "resumable"; token: string }
  | { kind: "resumed"; token: string }
  | { kind: "updated"; paddingMs: number }
  | { kind: "heard"; itemId: string; startMs: number }
  | { kind: "silent"; itemId: string }
  | { kind: "committed"; itemId: string }
  | { kind: "words"; who: Speaker; itemId: string; text: string }
  /** All of it: it takes the place of the fragments before. */
  | { kind: "text"; who: Speaker; itemId: string; text: string }
  | { kind: "answering"; responseId: string }
  | { kind: "sound"; itemId: string; samples: Float32Array<ArrayBuffer> }
  | { kind: "answered"; responseId: string; status: string; itemIds: string[] }
  | { kind: "call"; itemId: string; callId: string; name: string; args: string }
  | { kind: "trouble"; what: string }
  | { kind: "error"; code: string; message: string }
  | { kind: "closed"; reason: string };
export type Speaker = "user" | "voice";

type Fields = Record<string, unknown>;

/** Number of an event in its session and what it says, null when it is none of the page's. Throws on what is no event. */
export function readEvent(text: string): { seq: number; event: VoiceEvent | null } {
  const fields = JSON.parse(text) as Fields;
  if (typeof fields !== "object" || fields === null || typeof fields.type !== "string") throw new Error("not an event");
  const seq = typeof fields.server_event_seq === "number" ? fields.server_event_seq : 0;
  return { seq, event: eventOf(fields) };
}

function eventOf(fields: Fields): VoiceEvent | null {
  const itemId = String(fields.item_id ?? "");
  switch (fields.type) {
    case "session.created": return { kind: "created", sessionId: string(inside(fields, "session").id), model: string(inside(fields, "session").model) };
    case "session.resumable": return { kind: "resumable", token: string(fields.resume_token) };
    case "session.resumed": return { kind: "resumed", token: string(fields.resume_token) };
    case "session.updated": return { kind: "updated", paddingMs: paddingOf(inside(fields, "session")) };
    case "input_audio_buffer.speech_started": return { kind: "heard", itemId, startMs: number(fields.audio_start_ms) };
    case "input_audio_buffer.speech_stopped": return { kind: "silent", itemId };
    case "input_audio_buffer.committed": return { kind: "committed", itemId };
    case "conversation.item.input_audio_transcription.delta": return { kind: "words", who: "user", itemId, text: string(fields.delta) };
    case "conversation.item.input_audio_transcription.completed": return { kind: "text", who: "user", itemId, text: string(fields.transcript) };
    case "response.output_audio_transcript.delta":
    case "response.output_text.delta": return { kind: "words", who: "voice", itemId, text: string(fields.delta) };
    case "response.created": return { kind: "answering", responseId: string(inside(fields, "response").id) };
    case "response.output_audio.delta": return { kind: "sound", itemId, samples: fromBase64(string(fields.delta)) };
    case "response.function_call_arguments.done":
      return { kind: "call", itemId, callId: string(fields.call_id), name: string(fields.name), args: string(fields.arguments) };
    case "response.done": {
      const response = inside(fields, "response");
      const output = Array.isArray(response.output) ? (response.output as Fields[]) : [];
      const messages = output.filter((item) => item.type === "message");
      return { kind: "answered", responseId: string(response.id), status: string(response.status), itemIds: messages.map((item) => string(item.id)) };
    }
    case "conversation.item.retrieved": return retrieved(inside(fields, "item"));
    case "input_audio_buffer.report": return { kind: "trouble", what: string(fields.kind) };
    case "error": return { kind: "error", code: String(inside(fields, "error").code ?? ""), message: string(inside(fields, "error").message) };
    case "session.closed": return { kind: "closed", reason: string(fields.reason) };
    case "session.replaced": return { kind: "closed", reason: "replaced" };
    default: return null;
  }
}

/** The server asks for an item only after an interruption: what it still has is what was heard. */
function retrieved(item: Fields): VoiceEvent {
  const parts = Array.isArray(item.content) ? (item.content as Fields[]) : [];
  const text = parts.map((part) => String(part.transcript ?? part.text ?? "")).join("");
  return { kind: "text", who: item.role === "assistant" ? "voice" : "user", itemId: string(item.id), text };
}

function paddingOf(session: Fields): number {
  const detection = inside(inside(inside(session, "audio"), "input"), "turn_detection");
  return typeof detection.prefix_padding_ms === "number" ? detection.prefix_padding_ms : 0;
}

function inside(fields: Fields, name: string): Fields {
  const value = fields[name];
  return typeof value === "object" && value !== null ? (value as Fields) : {};
}

function string(value: unknown): string {
  if (typeof value !== "string") throw new Error("a text is missing");
  return value;
}

function number(value: unknown): number {
  if (typeof value !== "number") throw new Error("a number is missing");
  return value;
}

/** Base64 of 16 bit little-endian samples, as the wire has them, to -1..1. */
export function fromBase64(text: string): Float32Array<ArrayBuffer> {
  const binary = atob(text);
  const bytes = Uint8Array.from(binary, (char) => char.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  return Float32Array.from({ length: bytes.length >> 1 }, (_, i) => view.getInt16(2 * i, true) / 32_768);
}

/** -1..1 to base64 of 16 bit little-endian samples. */
export function toBase64(samples: Float32Array): string {
  const view = new DataView(new ArrayBuffer(2 * samples.length));
  samples.forEach((sample, i) => view.setInt16(2 * i, Math.max(-32_768, Math.min(32_767, Math.round(sample * 32_768))), true));
  return btoa(Array.from(new Uint8Array(view.buffer), (byte) => String.fromCharCode(byte)).join(""));
}
