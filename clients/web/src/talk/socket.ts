// The socket of a call: opens it, comes back to it when the connection is lost, and numbers what came. Owns the resume token.
// What the events mean is talk.ts's.

import { keySubprotocol } from "../protocol";
import { readEvent, type VoiceEvent } from "./events";

export type CallLink = "connecting" | "open" | "waiting" | "off";

export interface SocketHooks {
  onLink: (link: CallLink) => void;
  onEvent: (event: VoiceEvent) => void;
  /** It is over: never opened, closed by the server, or lost for longer than the server keeps a call. */
  onGone: (why: "refused" | "lost" | "ended", detail: string) => void;
}

const SUBPROTOCOL = "realtime";
const BACKOFF_MS = [150, 500, 1_000, 2_000, 4_000, 8_000]; // together within the grace that a server gives (30 s)
const CONNECT_TIMEOUT_MS = 8_000;

export class CallSocket {
  private socket: WebSocket | null = null;
  private wanted = false;
  private sessionId = "";
  private token = "";
  private seq = 0;
  private attempt = 0;
  private timer = 0;

  constructor(private readonly url: string, private readonly apiKey: () => string | null, private readonly hooks: SocketHooks) {
    window.addEventListener("online", () => { if (this.wanted && !this.socket) this.connect(); });
  }

  start(): void {
    this.drop();
    Object.assign(this, { wanted: true, sessionId: "", token: "", seq: 0, attempt: 0 });
    this.connect();
  }

  /** Says whether it left. */
  send(event: Record<string, unknown>): boolean {
    if (this.socket?.readyState !== WebSocket.OPEN) return false;
    this.socket.send(JSON.stringify(event));
    return true;
  }

  /** As a lost network would. */
  cut(): void {
    this.socket?.close();
  }

  drop(): void {
    this.wanted = false;
    clearTimeout(this.timer);
    const { socket } = this;
    this.socket = null;
    if (socket && socket.readyState <= WebSocket.OPEN) socket.close(1000);
    this.hooks.onLink("off");
  }

  private connect(): void {
    clearTimeout(this.timer);
    this.hooks.onLink("connecting");
    const key = this.apiKey();
    const query = this.token === "" ? "" : `?${new URLSearchParams({ session_id: this.sessionId, resume_token: this.token, last_server_event_seq: String(this.seq) })}`;
    const socket = new WebSocket(this.url + query, key ? [SUBPROTOCOL, keySubprotocol(key)] : [SUBPROTOCOL]);
    this.socket = socket;
    this.timer = window.setTimeout(() => socket.close(), CONNECT_TIMEOUT_MS);
    socket.onopen = () => {
      clearTimeout(this.timer);
      this.hooks.onLink("open");
    };
    socket.onmessage = ({ data }: MessageEvent<string>) => { if (socket === this.socket) this.received(data); };
    socket.onclose = ({ code, reason }) => { if (socket === this.socket) this.lost(code, reason); };
  }

  private received(data: string): void {
    const { seq, event } = readEvent(data);
    this.seq = seq || this.seq;
    if (event === null) return;
    if (event.kind === "created") this.sessionId = event.sessionId;
    if (event.kind === "resumable" || event.kind === "resumed") this.token = event.token;
    if (event.kind === "resumed") this.attempt = 0;
    this.hooks.onEvent(event);
  }

  private lost(code: number, reason: string): void {
    clearTimeout(this.timer);
    this.socket = null;
    if (!this.wanted) return;
    const over = code === 1000 || code === 1001 || code === 1008 || code === 1011 || code === 1013;
    const pause = BACKOFF_MS[this.attempt];
    if (over || this.token === "" || pause === undefined) {
      this.wanted = false;
      this.hooks.onLink("off");
      this.hooks.onGone(this.token === "" ? "refused" : over ? "ended" : "lost", reason);
      return;
    }
    this.attempt += 1;
    this.hooks.onLink("waiting");
    this.timer = window.setTimeout(() => this.connect(), pause);
  }
}
