// The second walk of a "what if": a connection, a player and a canvas of its own. Owns nothing that the first walk has: the app
// tells it which keys are held and which place is asked for, and takes its machine over when it is the walk to keep.

import { Connection } from "./connection";
import { byId, setText } from "./dom";
import { WorldMachine } from "./machine";
import { explain } from "./messages";
import { WorldPicture } from "./picture";
import { Player } from "./player";
import type { Format, Frame, ServerMessage } from "./protocol";

export class Branch {
  readonly picture = new WorldPicture(byId<HTMLCanvasElement>("branch-view"), null);
  private readonly player = new Player(this.picture, {
    onShown: (frame) => this.shown(frame),
    onDecoderFailure: () => this.connection.reconnect("jpeg"),
  });
  private readonly connection: Connection;
  private open = false;
  private heldNow: { track: string; keys: string[] } | null = null;

  constructor(url: string, apiKey: () => string | null, private readonly log: (text: string) => void) {
    this.connection = new Connection(url, apiKey, {
      onLink: (link) => { if (link.state === "waiting" && link.attempt > 1) this.say("Reconnecting"); },
      onMessage: (message) => this.received(message),
      onFrame: (frame) => this.player.push(frame),
      onBytes: () => undefined,
      onBroken: (reason) => this.log(`branch: ${reason}`),
    });
  }

  get active(): boolean { return this.open; }
  get machine(): WorldMachine { return this.connection.machine; }
  get shownFrames(): number { return this.player.shownFrames; }

  /** Opens a branch that the server has made; until its first frame it shows what its parent shows. */
  begin(machine: WorldMachine, format: Format, world: HTMLCanvasElement): void {
    this.open = true;
    this.heldNow = null;
    this.player.stop();
    this.picture.resize(world.width, world.height);
    this.picture.draw(world);
    this.say("");
    this.place(machine.prompt);
    this.connection.comeBack(machine, format);
  }

  /** Leaves the session as it is and hands out its machine: somebody else goes on with it. */
  release(): WorldMachine {
    const { machine } = this;
    this.open = false;
    this.connection.drop();
    this.player.stop();
    this.connection.machine = new WorldMachine();
    return machine;
  }

  /** Ends the session. */
  end(): void {
    if (!this.open) return;
    if (["live", "paused", "failed"].includes(this.machine.phase)) this.connection.send(this.machine.command("session.close"));
    this.release();
  }

  hold(track: string, keys: string[], tMs: number): void {
    this.heldNow = { track, keys };
    if (["live", "paused"].includes(this.machine.phase)) this.connection.send(this.machine.heldKeys(track, keys, tMs).message);
  }

  ask(prompt: string): void {
    if (!["live", "paused", "detached", "resuming"].includes(this.machine.phase)) return;
    const { message } = this.machine.event({ prompt });
    if (["live", "paused"].includes(this.machine.phase)) this.connection.send(message);
  }

  pause(paused: boolean): void {
    const wanted = paused ? "live" : "paused";
    if (this.machine.phase === wanted) this.connection.send(this.machine.command(paused ? "session.pause" : "session.resume_play"));
  }

  private received(message: ServerMessage): void {
    const { machine } = this;
    switch (message.type) {
      case "session.resumed": {
        const { width, height, fps, frames_per_block: framesPerBlock } = machine.session!;
        const { format, codec } = machine;
        if (this.player.configure({ format, codec, width, height, fps, framesPerBlock })) machine.skipToReceived();
        this.connection.send(machine.ack());
        for (const event of machine.unansweredEvents()) this.connection.send(event);
        if (this.heldNow) this.hold(this.heldNow.track, this.heldNow.keys, 0);
        return this.say("");
      }
      case "chunk": return this.player.blockArrived(performance.now());
      case "session.playing": return this.player.restartBeat();
      case "session.failed": return this.say(explain(message.code, ""));
      case "session.closed": return this.say(explain(message.code ?? "session_gone", ""));
      case "error": return this.refused(message.code, message.message);
      default: return;
    }
  }

  private refused(code: string, text: string): void {
    this.log(`branch: ${code}: ${text}`);
    this.say(explain(code, text));
    if (this.machine.phase === "detached") this.connection.drop(); // the resume was refused: the branch is gone
  }

  private shown(frame: Frame): void {
    const { machine } = this;
    if (!machine.displayed(frame)) return;
    if (["live", "paused", "failed"].includes(machine.phase)) this.connection.send(machine.ack());
    this.place(machine.prompt);
  }

  private place(prompt: string): void {
    const place = byId("branch-place");
    place.hidden = prompt === "";
    setText(place, prompt);
    byId("branch-view").setAttribute("aria-label", prompt ? `The branch: ${prompt}` : "The branch");
  }

  private say(text: string): void {
    setText(byId("branch-note"), text);
  }
}
