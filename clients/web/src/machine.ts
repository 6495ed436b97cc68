// The client side of one world session, without I/O: what was sent, what has arrived, what may come next.
// Owns the session's identity, token, numbers and phase. Knows no socket, clock or DOM.
// Invariants: seq rises by exactly one across reconnects; event ids are never reused; `displayed` never exceeds what arrived.

import {
  HELD_KEYS_SCHEMA, parseFrame, parseMessage, ProtocolError, seqOf,
  type ClientMessage, type Control, type FailureAction, type Forked, type Format, type Frame, type ServerMessage, type Started,
} from "./protocol";

export type Phase = "idle" | "starting" | "live" | "paused" | "failed" | "detached" | "resuming" | "closed";
export type StartOptions = Omit<Extract<ClientMessage, { type: "session.start" }>, "type">;
export type ResetOptions = Omit<Extract<ClientMessage, { type: "session.reset" }>, "type">;

export class StateError extends Error {}

/** What a page keeps to come back to its session after a reload. */
export interface Saved {
  started: Started; lastSeq: number; epoch: number; received: number; framesDue: number; nextEventId: number;
  unanswered: [number, ClientMessage][];
}

export class WorldMachine {
  phase: Phase = "idle";
  session: Started | null = null;
  format: Format = "h264";
  codec: string | null = null;
  lastSeq = 0;
  epoch = 0;
  prompt = "";
  seed = 0;
  chunkIndex: number | null = null;
  acceptedEvents = 0;
  appliedEvents = 0;
  can: FailureAction[] = [];
  oldestRewind: number | null = null; // the smallest chunk that a rewind can go back to; null: neither rewind nor fork
  private token = "";
  private nextEventId = 0;
  private readonly unanswered = new Map<number, ClientMessage>(); // events that were not accepted or refused yet, in order
  private received = 0; // frames of this epoch that have arrived
  private shown = 0; // frames of this epoch that were drawn
  private framesDue = 0; // binary frames that the last chunk message announced

  /** A session whose connection is lost, and that waits for the next one. */
  get canResume(): boolean {
    return this.phase === "detached" || this.phase === "resuming";
  }

  // ------------------------------------------------------------------------------------------------ client messages

  start(options: StartOptions): ClientMessage {
    if (this.phase !== "idle") throw new StateError(`start in ${this.phase}`);
    this.phase = "starting";
    return { type: "session.start", ...options };
  }

  resume(options: { takeover?: boolean; format?: Format } = {}): ClientMessage {
    if (!this.session || this.phase !== "detached") throw new StateError(`resume in ${this.phase}`);
    this.phase = "resuming";
    return {
      type: "session.resume", session_id: this.session.session_id, resume_token: this.token, last_seq: this.lastSeq, ...options,
    };
  }

  /** Without a connection the event is kept, and is among `unansweredEvents` after the resume. */
  event(what: { prompt?: string; controls?: Control[] }): { message: ClientMessage; eventId: number } {
    this.need("live", "paused", "detached", "resuming");
    const eventId = this.nextEventId++;
    const message: ClientMessage = { type: "session.event", event_id: eventId, ...what };
    this.unanswered.set(eventId, message);
    return { message, eventId };
  }

  /** What has to be sent again right after `session.resumed`, unchanged and in this order. */
  unansweredEvents(): ClientMessage[] {
    return [...this.unanswered.values()];
  }

  heldKeys(track: string, keys: string[], tMs: number): { message: ClientMessage; eventId: number } {
    return this.event({ controls: [{ track, schema: HELD_KEYS_SCHEMA, data: { keys, t_ms: tMs } }] });
  }

  ack(): ClientMessage {
    this.need("live", "paused", "failed");
    return { type: "session.ack", seq: this.lastSeq, displayed: this.shown, epoch: this.epoch };
  }

  reset(options: ResetOptions): ClientMessage {
    this.need("live", "paused", "failed");
    return { type: "session.reset", ...options };
  }

  fork(): ClientMessage {
    this.need("live", "paused", "failed");
    return { type: "session.fork" };
  }

  /** To the moment when `chunkIndex` was the next chunk. */
  rewind(chunkIndex: number): ClientMessage {
    this.need("live", "paused", "failed");
    return { type: "session.rewind", chunk_index: chunkIndex };
  }

  /** The machine of a branch: it waits for a connection that resumes it. */
  branch(forked: Forked): WorldMachine {
    const { session_id, resume_token, prompt, seed, oldest_rewind } = forked;
    // Ids that this machine has used may be unknown to the server yet.
    const next_event_id = Math.max(forked.next_event_id, this.nextEventId);
    const twin = new WorldMachine();
    twin.adopt({ ...this.session!, session_id, resume_token, prompt, seed, next_event_id, oldest_rewind, format: this.format, codec: this.codec });
    twin.phase = "detached";
    twin.lastSeq = 1; // stands for the session.forked
    twin.epoch = forked.epoch;
    twin.received = twin.shown = forked.next_frame;
    return twin;
  }

  command(type: "session.pause" | "session.resume_play" | "session.abort" | "session.rollback" | "session.close"): ClientMessage {
    this.need("live", "paused", "failed");
    return { type };
  }

  // ------------------------------------------------------------------------------------------------ what happened

  /** A frame was drawn; false when it belongs to an epoch that is over. */
  displayed(frame: Frame): boolean {
    if (frame.epoch !== this.epoch) return false;
    this.shown = Math.max(this.shown, frame.frame + 1);
    return true;
  }

  /** Frames that arrived and can't be drawn any more (the decoder was replaced, the page reloaded) count as shown. */
  skipToReceived(): void {
    this.shown = this.received;
  }

  /** The socket is gone. A session that was not closed can be resumed. */
  detach(): void {
    if (this.phase === "closed" || this.phase === "idle") return;
    this.phase = this.session ? "detached" : "idle";
    // framesDue stays: a replay that begins inside a chunk sends the rest of it without its chunk message
  }

  receiveText(text: string): ServerMessage {
    const message = parseMessage(text);
    const seq = seqOf(message);
    if (seq !== null) this.checkSeq(seq);
    this.move(message);
    return message;
  }

  receiveBinary(bytes: ArrayBuffer): Frame {
    const frame = parseFrame(bytes);
    if (this.framesDue === 0) throw new ProtocolError("a frame that no chunk announced", "frame");
    this.checkSeq(frame.seq);
    this.framesDue -= 1;
    if (frame.epoch === this.epoch) this.received = Math.max(this.received, frame.frame + 1);
    return frame;
  }

  // ------------------------------------------------------------------------------------------------ reload

  save(): Saved | null {
    if (!this.session || this.phase === "closed") return null;
    const { lastSeq, epoch, received, framesDue, nextEventId } = this;
    const started = { ...this.session, resume_token: this.token, prompt: this.prompt || null, seed: this.seed, oldest_rewind: this.oldestRewind };
    return { started, lastSeq, epoch, received, framesDue, nextEventId, unanswered: [...this.unanswered] };
  }

  static restore(saved: Saved): WorldMachine {
    const machine = new WorldMachine();
    machine.adopt(saved.started);
    machine.phase = "detached";
    machine.lastSeq = saved.lastSeq;
    machine.epoch = saved.epoch;
    machine.received = machine.shown = saved.received;
    machine.framesDue = saved.framesDue;
    machine.nextEventId = saved.nextEventId;
    for (const [id, message] of saved.unanswered) machine.unanswered.set(id, message);
    return machine;
  }

  statistics() {
    return {
      phase: this.phase, lastSeq: this.lastSeq, epoch: this.epoch, received: this.received, shown: this.shown,
      accepted: this.acceptedEvents, applied: this.appliedEvents, nextEventId: this.nextEventId,
    };
  }

  // ------------------------------------------------------------------------------------------------ inside

  private need(...phases: Phase[]): void {
    if (!phases.includes(this.phase)) throw new StateError(`not possible while ${this.phase}`);
  }

  private checkSeq(seq: number): void {
    if (seq !== this.lastSeq + 1) throw new ProtocolError(`${this.lastSeq + 1} expected, got ${seq}`, "seq");
    this.lastSeq = seq;
  }

  private adopt(started: Started): void {
    this.session = started;
    this.token = started.resume_token;
    this.format = started.format;
    this.codec = started.codec;
    this.prompt = started.prompt ?? "";
    this.seed = started.seed;
    this.nextEventId = started.next_event_id;
    this.oldestRewind = started.oldest_rewind;
  }

  private newEpoch(message: { epoch: number; prompt: string | null }, frame: number): void {
    this.epoch = message.epoch;
    this.prompt = message.prompt ?? "";
    this.received = this.shown = frame;
    if (this.phase === "failed") this.phase = "live";
    this.can = [];
  }

  private move(message: ServerMessage): void {
    switch (message.type) {
      case "session.started":
        if (this.phase !== "starting") throw new ProtocolError(`session.started while ${this.phase}`, "type");
        this.adopt(message);
        this.phase = "live";
        return;
      case "session.resumed":
        if (this.phase !== "resuming") throw new ProtocolError(`session.resumed while ${this.phase}`, "type");
        this.token = message.resume_token;
        this.format = message.format;
        this.codec = message.codec;
        if (message.replayed_from !== this.lastSeq + 1) throw new ProtocolError("a gap in the replay", "$.replayed_from");
        this.phase = message.state === "playing" ? "live" : message.state;
        this.nextEventId = Math.max(this.nextEventId, message.next_event_id);
        return;
      case "event.accepted":
        this.unanswered.delete(message.event_id);
        if (message.status === "accepted") this.acceptedEvents += 1;
        return;
      case "event.applied":
        this.appliedEvents += message.event_ids.length;
        return;
      case "chunk":
        if (this.framesDue > 0) throw new ProtocolError("frames of the last chunk are missing", "$");
        this.framesDue = message.latent_shape ? 1 : message.frames;
        this.chunkIndex = message.chunk_index;
        this.oldestRewind = message.oldest_rewind;
        this.prompt = message.prompt ?? "";
        return;
      case "session.paused":
        this.phase = "paused";
        return;
      case "session.playing":
        this.phase = "live";
        return;
      case "session.reset_done":
        this.seed = message.seed;
        this.oldestRewind = this.oldestRewind === null ? null : 0;
        return this.newEpoch(message, 0);
      case "session.replayed":
        this.nextEventId = Math.max(this.nextEventId, message.next_event_id);
        return;
      case "session.rewound":
        this.oldestRewind = message.oldest_rewind;
        this.chunkIndex = message.chunk_index > 0 ? message.chunk_index - 1 : null;
        return this.newEpoch(message, message.next_frame);
      case "session.failed":
        this.phase = "failed";
        this.can = message.can;
        return;
      case "session.recovered":
        this.phase = "live";
        this.can = [];
        return;
      case "session.closed":
        this.phase = "closed";
        return;
      case "error":
        if (message.event_id !== undefined && message.event_id !== null) this.unanswered.delete(message.event_id);
        // A refused start leaves nothing behind; a refused resume leaves the session where it was.
        if (this.phase === "starting") this.phase = "idle";
        else if (this.phase === "resuming") this.phase = "detached";
        return;
      default:
        return;
    }
  }
}
