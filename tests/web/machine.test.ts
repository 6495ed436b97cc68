import { StateError, WorldMachine } from "@page/machine";
import { ProtocolError, type ServerMessage } from "@page/protocol";

type Loose = Record<string, unknown>;

const STARTED: Loose = {
  type: "session.started", seq: 1, session_id: "s1", resume_token: "t1", model: "tiny", prompt: "a maze", seed: 7, format: "jpeg",
  codec: null, width: 4, height: 4, fps: 10, frames_per_block: 3, cadence: "paced", lead_frames: 3,
  limits: { max_pending_events: 8, max_message_bytes: 65536, max_events_per_s: 50, grace_s: 30, stall_timeout_s: 60, horizon_frames: null },
  controls: [], prompts: [], starts: [], next_event_id: 0, can_fork: true, oldest_rewind: 0,
};
const RESUMED: Loose = {
  type: "session.resumed", session_id: "s1", resume_token: "t2", replayed_from: 2, state: "playing", epoch: 0, next_frame: 0,
  next_event_id: 0, format: "jpeg", codec: null,
};
const chunk = (seq: number, index: number, extra: Loose = {}): Loose => ({
  type: "chunk", seq, epoch: 0, chunk_index: index, first_frame: index * 3, frames: 3, applied_event_ids: [], prompt: "a maze",
  timings_ms: { tick: 1, encode: 1, wait: 0 }, kv: { pages_used: 1, pages_total: 2 }, oldest_rewind: 0, ...extra,
});

function frameBytes(seq: number, frame: number, epoch = 0): ArrayBuffer {
  const bytes = new ArrayBuffer(50);
  const view = new DataView(bytes);
  view.setUint16(0, 0x4f52, true);
  view.setUint8(2, 1);
  view.setUint8(3, 2);
  view.setUint8(4, 1);
  view.setUint16(6, 48, true);
  view.setBigUint64(8, BigInt(seq), true);
  view.setUint32(16, epoch, true);
  view.setBigUint64(24, BigInt(frame), true);
  view.setBigUint64(32, 0xffff_ffff_ffff_ffffn, true);
  view.setUint32(44, 2, true);
  return bytes;
}

const tell = (machine: WorldMachine, message: Loose): ServerMessage => machine.receiveText(JSON.stringify(message));

function started(): WorldMachine {
  const machine = new WorldMachine();
  machine.start({ format: "jpeg" });
  tell(machine, STARTED);
  return machine;
}

describe("the machine", () => {
  it("starts once, and counts from the server's numbers", () => {
    const machine = started();
    expect(machine.phase).toBe("live");
    expect(machine.lastSeq).toBe(1);
    expect(() => machine.start({ format: "jpeg" })).toThrow(StateError);
  });

  it("gives event ids in order, each once", () => {
    const machine = started();
    expect(machine.event({ prompt: "a" }).eventId).toBe(0);
    expect(machine.heldKeys("camera", ["w"], 12)).toEqual({
      eventId: 1,
      message: {
        type: "session.event", event_id: 1,
        controls: [{ track: "camera", schema: "realtime_omni.held_keys.v1", data: { keys: ["w"], t_ms: 12 } }],
      },
    });
  });

  it("takes frames only as the chunk announced them", () => {
    const machine = started();
    expect(() => machine.receiveBinary(frameBytes(2, 0))).toThrow(ProtocolError);
    tell(machine, chunk(2, 0));
    for (const frame of [0, 1, 2]) machine.receiveBinary(frameBytes(3 + frame, frame));
    expect(() => machine.receiveBinary(frameBytes(6, 3))).toThrow(ProtocolError);
  });

  it("finds a gap in the numbers, in text and in frames", () => {
    const machine = started();
    expect(() => tell(machine, { type: "session.paused", seq: 3 })).toThrow(ProtocolError);
    tell(machine, chunk(2, 0));
    expect(() => machine.receiveBinary(frameBytes(4, 0))).toThrow(ProtocolError);
  });

  it("acknowledges what arrived and what was shown", () => {
    const machine = started();
    tell(machine, chunk(2, 0));
    const first = machine.receiveBinary(frameBytes(3, 0));
    expect(machine.ack()).toEqual({ type: "session.ack", seq: 3, displayed: 0, epoch: 0 });
    expect(machine.displayed(first)).toBe(true);
    expect(machine.ack()).toEqual({ type: "session.ack", seq: 3, displayed: 1, epoch: 0 });
  });

  it("counts anew after a reset and does not count frames of before", () => {
    const machine = started();
    tell(machine, chunk(2, 0));
    const old = [0, 1, 2].map((frame) => machine.receiveBinary(frameBytes(3 + frame, frame)))[2]!;
    tell(machine, { type: "session.reset_done", seq: 6, epoch: 1, prompt: "a garden", seed: 9 });
    expect(machine.displayed(old)).toBe(false);
    expect(machine.ack()).toEqual({ type: "session.ack", seq: 6, displayed: 0, epoch: 1 });
    expect([machine.prompt, machine.seed]).toEqual(["a garden", 9]);
  });

  it("goes back: counts on from the frame that the rewind names, and not with frames of before", () => {
    const machine = started();
    tell(machine, chunk(2, 0));
    for (const frame of [0, 1, 2]) machine.receiveBinary(frameBytes(3 + frame, frame));
    tell(machine, chunk(6, 1));
    const old = [3, 4, 5].map((frame) => machine.receiveBinary(frameBytes(4 + frame, frame)))[2]!;
    expect(machine.rewind(1)).toEqual({ type: "session.rewind", chunk_index: 1 });
    tell(machine, { type: "session.rewound", seq: 10, epoch: 1, chunk_index: 1, next_frame: 3, prompt: "a garden", oldest_rewind: 1 });
    expect(machine.displayed(old)).toBe(false);
    expect(machine.ack()).toEqual({ type: "session.ack", seq: 10, displayed: 3, epoch: 1 });
    expect([machine.prompt, machine.oldestRewind, machine.chunkIndex]).toEqual(["a garden", 1, 0]);
    tell(machine, chunk(11, 1, { epoch: 1 }));
    expect(machine.displayed(machine.receiveBinary(frameBytes(12, 3, 1)))).toBe(true);
  });

  it("makes a branch that is opened by a resume and has event ids of its own", () => {
    const machine = started();
    machine.event({ prompt: "on its way" });
    const forked = tell(machine, {
      type: "session.forked", seq: 2, session_id: "s2", resume_token: "b1", grace_s: 30, epoch: 0, chunk_index: 4, next_frame: 12,
      prompt: "a maze", seed: 7, next_event_id: 0, oldest_rewind: 1,
    }) as Extract<ServerMessage, { type: "session.forked" }>;
    const branch = machine.branch(forked);
    expect(branch.resume()).toEqual({ type: "session.resume", session_id: "s2", resume_token: "b1", last_seq: 1 });
    tell(branch, { ...RESUMED, session_id: "s2", next_frame: 12 });
    expect(branch.phase).toBe("live");
    expect(branch.event({ prompt: "x" }).eventId).toBe(1);
    expect(branch.ack()).toEqual({ type: "session.ack", seq: 1, displayed: 12, epoch: 0 });
    expect(branch.unansweredEvents()).toHaveLength(1);
    expect(machine.lastSeq).toBe(2);
  });

  it("resumes with the newest token and the last number, and takes the rest of a chunk", () => {
    const machine = started();
    tell(machine, chunk(2, 0));
    machine.receiveBinary(frameBytes(3, 0));
    machine.detach();
    expect(machine.phase).toBe("detached");
    expect(machine.resume({ takeover: true })).toEqual({
      type: "session.resume", session_id: "s1", resume_token: "t1", last_seq: 3, takeover: true,
    });
    tell(machine, { ...RESUMED, replayed_from: 4 });
    machine.receiveBinary(frameBytes(4, 1));
    machine.receiveBinary(frameBytes(5, 2));
    machine.detach();
    expect(machine.resume()).toMatchObject({ resume_token: "t2", last_seq: 5 });
  });

  it("refuses a replay with a gap", () => {
    const machine = started();
    machine.detach();
    machine.resume();
    expect(() => tell(machine, { ...RESUMED, replayed_from: 3 })).toThrow(ProtocolError);
  });

  it("sends every event again that has no answer, unchanged and in order, until it has one", () => {
    const machine = started();
    machine.event({ prompt: "first" });
    const second = machine.heldKeys("camera", ["w"], 5).message;
    const third = machine.event({ prompt: "third" }).message;
    tell(machine, { type: "event.accepted", seq: 2, event_id: 0, status: "accepted", pending: 1 });
    machine.detach();
    const fourth = machine.event({ prompt: "said while nobody listened" }).message;
    machine.resume();
    tell(machine, { ...RESUMED, replayed_from: 3, next_event_id: 2 }); // the second had arrived, its answer was lost
    expect(machine.unansweredEvents()).toEqual([second, third, fourth]);
    tell(machine, { type: "event.accepted", seq: 3, event_id: 1, status: "duplicate", pending: 0 });
    tell(machine, { type: "error", code: "stale", message: "", event_id: 2, fatal: false });
    expect(machine.unansweredEvents()).toEqual([fourth]);
    expect(machine.event({ prompt: "next" }).eventId).toBe(4);
  });

  it("takes what has no answer along through a reload", () => {
    const machine = started();
    const { message } = machine.event({ prompt: "x" });
    const back = WorldMachine.restore(JSON.parse(JSON.stringify(machine.save())) as NonNullable<ReturnType<WorldMachine["save"]>>);
    expect(back.unansweredEvents()).toEqual([message]);
  });

  it("offers what the server says can be done about a failure", () => {
    const machine = started();
    tell(machine, { type: "session.failed", seq: 2, code: "tick_failed", message: "", chunk_index: 1, can: ["rollback", "close"] });
    expect(machine.phase).toBe("failed");
    expect(machine.can).toEqual(["rollback", "close"]);
    expect(() => machine.event({ prompt: "x" })).toThrow(StateError);
    expect(machine.command("session.rollback")).toEqual({ type: "session.rollback" });
    tell(machine, { type: "session.recovered", seq: 3, chunk_index: 1 });
    expect(machine.phase).toBe("live");
  });

  it("does not come back from a closed session", () => {
    const machine = started();
    tell(machine, { type: "session.closed", seq: 2, reason: "client" });
    machine.detach();
    expect(machine.phase).toBe("closed");
    expect(() => machine.resume()).toThrow(StateError);
    expect(machine.save()).toBe(null);
  });

  it("takes a takeover's end without a number", () => {
    const machine = started();
    tell(machine, { type: "session.closed", reason: "taken_over" });
    expect(machine.phase).toBe("closed");
  });

  it("survives a reload: what it kept resumes, with everything received counted as shown", () => {
    const machine = started();
    tell(machine, chunk(2, 0));
    machine.receiveBinary(frameBytes(3, 0));
    machine.event({ prompt: "x" });
    const back = WorldMachine.restore(JSON.parse(JSON.stringify(machine.save())) as NonNullable<ReturnType<WorldMachine["save"]>>);
    expect(back.resume()).toMatchObject({ session_id: "s1", resume_token: "t1", last_seq: 3 });
    tell(back, { ...RESUMED, replayed_from: 4 });
    back.receiveBinary(frameBytes(4, 1));
    expect(back.ack()).toEqual({ type: "session.ack", seq: 4, displayed: 1, epoch: 0 });
    expect(back.event({ prompt: "y" }).eventId).toBe(1);
  });

  it("may try again after a refused start", () => {
    const machine = new WorldMachine();
    machine.start({ format: "jpeg", model: "none" });
    tell(machine, { type: "error", code: "model_unknown", message: "", fatal: false });
    expect(machine.phase).toBe("idle");
    machine.start({ format: "jpeg" });
  });
});
