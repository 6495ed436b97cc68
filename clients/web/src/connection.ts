// The shell around the machine: a WebSocket that comes back. Owns the socket, the backoff and the heartbeat.
// A lost socket is replaced and the session resumed until the session says that it is over; a socket that lost its session to
// another window is not.

import { StateError, WorldMachine, type StartOptions } from "./machine";
import { keySubprotocol, SUBPROTOCOL, type ClientMessage, type Format, type Frame, type ServerMessage } from "./protocol";

export type Link =
  | { state: "connecting"; attempt: number }
  | { state: "open" }
  | { state: "waiting"; retryInMs: number; attempt: number; everOpened: boolean }
  | { state: "off" };

export interface ConnectionHooks {
  onLink: (link: Link) => void;
  onMessage: (message: ServerMessage) => void;
  onFrame: (frame: Frame, bytes: number) => void;
  onBytes: (bytes: number) => void;
  /** A message or frame that breaks the protocol; the connection is dropped and resumed. */
  onBroken: (reason: string) => void;
}

const BACKOFF_MS = [150, 400, 1_000, 2_000, 4_000, 6_000];
const CONNECT_TIMEOUT_MS = 8_000;
const PING_EVERY_MS = 5_000;
const PONG_TIMEOUT_MS = 12_000; // more than two pings: a busy laptop may be slow to answer one

export class Connection {
  machine = new WorldMachine();
  rttMs: number | null = null;
  private socket: WebSocket | null = null;
  private wanted = false;
  private attempt = 0;
  private timers: number[] = [];
  private startOptions: StartOptions | null = null;
  private resumeFormat: Format | null = null;
  private lastPongAt = 0;

  constructor(
    private readonly url: string, private readonly apiKey: () => string | null, private readonly hooks: ConnectionHooks,
  ) {
    window.addEventListener("online", () => this.retryNow());
  }

  /** A new session. */
  start(options: StartOptions): void {
    this.drop();
    this.machine = new WorldMachine();
    this.startOptions = options;
    this.begin();
  }

  /** Back to a session that this page had before a reload. */
  comeBack(machine: WorldMachine, format: Format): void {
    this.drop();
    this.machine = machine;
    this.startOptions = null;
    this.resumeFormat = format;
    this.begin();
  }

  /** Sends when the socket is open; says whether it did. */
  send(message: ClientMessage): boolean {
    if (this.socket?.readyState !== WebSocket.OPEN) return false;
    this.socket.send(JSON.stringify(message));
    return true;
  }

  /** Cuts the socket and resumes, with another format when one is given. */
  reconnect(format: Format | null = null): void {
    if (format) this.resumeFormat = format;
    if (this.startOptions && format) this.startOptions = { ...this.startOptions, format };
    this.lost();
  }

  retryNow(): void {
    if (!this.wanted || this.socket) return;
    this.attempt = 0;
    this.connect();
  }

  /** No socket and no further attempt. */
  drop(): void {
    this.wanted = false;
    this.closeSocket();
    this.hooks.onLink({ state: "off" });
  }

  private begin(): void {
    this.wanted = true;
    this.attempt = 0;
    this.connect();
  }

  private connect(): void {
    this.closeSocket();
    this.hooks.onLink({ state: "connecting", attempt: this.attempt });
    const key = this.apiKey();
    const socket = new WebSocket(this.url, key ? [SUBPROTOCOL, keySubprotocol(key)] : [SUBPROTOCOL]);
    socket.binaryType = "arraybuffer";
    this.socket = socket;
    let opened = false;
    this.later(CONNECT_TIMEOUT_MS, () => { if (!opened && socket === this.socket) this.lost(); });
    socket.onopen = () => {
      opened = true;
      if (socket === this.socket) this.opened();
    };
    socket.onmessage = (event: MessageEvent<string | ArrayBuffer>) => {
      if (socket === this.socket) this.received(event.data);
    };
    socket.onclose = () => {
      if (socket === this.socket) this.lost(opened);
    };
  }

  private opened(): void {
    this.lastPongAt = performance.now();
    const every = window.setInterval(() => this.heartbeat(), PING_EVERY_MS);
    this.timers.push(every);
    this.hooks.onLink({ state: "open" });
    if (this.machine.session) {
      // The page holds the only token, so a socket that still owns the session can only be this page's lost one.
      const format = this.resumeFormat ?? this.machine.format;
      this.send(this.machine.resume({ takeover: true, format }));
    } else if (this.startOptions) this.send(this.machine.start(this.startOptions));
    this.ping();
  }

  private received(data: string | ArrayBuffer): void {
    try {
      if (typeof data === "string") {
        this.hooks.onBytes(data.length);
        const message = this.machine.receiveText(data);
        if (message.type === "chunk") this.attempt = 0; // the session goes on: the next loss is a new one
        if (message.type === "session.closed") this.wanted = false;
        if (message.type === "pong" && typeof message.t === "number") {
          this.lastPongAt = performance.now();
          this.rttMs = this.lastPongAt - message.t;
        }
        this.hooks.onMessage(message);
      } else {
        this.hooks.onBytes(data.byteLength);
        this.hooks.onFrame(this.machine.receiveBinary(data), data.byteLength);
      }
    } catch (error) {
      if (error instanceof StateError) return; // our own answer came too late: nothing is wrong with the connection
      this.hooks.onBroken(String(error));
      this.lost();
    }
  }

  private heartbeat(): void {
    const now = performance.now();
    if (now - this.lastPongAt > PONG_TIMEOUT_MS && !document.hidden) this.lost();
    else this.ping();
  }

  private ping(): boolean {
    return this.send({ type: "ping", t: Math.round(performance.now() * 10) / 10 });
  }

  private lost(everOpened = true): void {
    this.closeSocket();
    if (!this.wanted) return this.hooks.onLink({ state: "off" });
    const base = BACKOFF_MS[Math.min(this.attempt, BACKOFF_MS.length - 1)]!;
    const retryInMs = Math.round(base * (0.8 + 0.4 * Math.random()));
    this.attempt += 1;
    this.later(retryInMs, () => { if (this.wanted && !this.socket) this.connect(); });
    this.hooks.onLink({ state: "waiting", retryInMs, attempt: this.attempt, everOpened });
  }

  private closeSocket(): void {
    for (const timer of this.timers) clearTimeout(timer); // intervals too: they share one id space
    this.timers = [];
    const socket = this.socket;
    this.socket = null;
    this.machine.detach();
    if (socket && socket.readyState <= WebSocket.OPEN) socket.close(1000);
  }

  private later(ms: number, run: () => void): void {
    this.timers.push(window.setTimeout(run, ms));
  }
}
