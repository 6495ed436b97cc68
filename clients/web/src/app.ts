// The page's middle: one connection, one player, one set of controls, and what each tells the others.

import { apiKey, serverAnswers, startOf } from "./api";
import { resetOptions, startOptions } from "./beginning";
import { Connection, type Link } from "./connection";
import { Controls, type Shortcut } from "./controls";
import { preferredFormat } from "./decoder";
import { askingForm, byId, toggleFullScreen } from "./dom";
import { Entrance } from "./entrance";
import { keysOf } from "./held";
import { keptSession } from "./kept";
import { WorldMachine } from "./machine";
import { BACK, closedNotice, errorNotice, explain, failedNotice, OPENING, sentence, waitingNotice, type Action } from "./messages";
import { LatencyMeter, RateMeter } from "./meters";
import { Panel } from "./panel";
import { WorldPicture } from "./picture";
import { Player } from "./player";
import { HELD_KEYS_SCHEMA, type Chunk, type Format, type Frame, type Rewound, type ServerError, type ServerMessage, type Started } from "./protocol";
import { Returning } from "./returning";
import { Steering, type Step } from "./steering";
import { TwoWalks } from "./two";
import { linkText, View, type Hint } from "./view";
import { VoiceButton } from "./voice-button";

export interface AppOptions { format: Format | null; model: string | null; debug: boolean }

const TURNS: readonly string[] = ["j", "l"];
const STRAIGHT_ON_S = 2.5; // long enough to reach the next wall
const OVER = new Set(["session_gone", "session_not_found", "resume_refused", "session_exists"]);

export class App {
  private readonly picture = new WorldPicture(byId<HTMLCanvasElement>("view"), byId<HTMLCanvasElement>("glow"));
  private readonly player = new Player(this.picture, {
    onShown: (frame, now) => this.shown(frame, now),
    onDecoderFailure: (reason) => this.fallBack(reason),
  });
  private readonly view = new View((action) => this.act(action), (key) => this.useKey(key));
  private readonly panel = new Panel({
    onPrompt: (prompt) => this.prompt(prompt),
    onReset: () => void this.reset(),
    onRenew: () => void this.again(),
    onClose: () => this.end(),
    onModel: (name) => { this.entrance.model = name; this.panel.forgetBeginning(); void this.renew(); },
    onNoPicture: () => this.view.say(sentence("image_invalid"), "bad"),
  });
  private readonly entrance: Entrance;
  private readonly two = new TwoWalks(this.url("world"), this.picture, {
    machine: () => this.machine,
    live: () => this.live,
    send: (message) => this.connection.send(message),
    sendKeys: () => this.sendKeys(null),
    say: (text) => this.view.say(text),
    log: (text) => this.log(text),
    goOnWith: (machine, branch) => this.goOnWith(machine, branch),
  });
  private readonly controls = new Controls([
    { view: byId("view"), stick: byId("stick") }, { view: byId("branch-view"), stick: byId("branch-stick") },
  ], {
    onKeys: (keys, at) => {
      this.walked ||= keys.length > 0;
      this.turned ||= keys.some((key) => TURNS.includes(key));
      this.sendKeys(at);
    },
    onShortcut: (name) => this.shortcut(name),
  });
  private readonly steering = new Steering({
    hold: (keys, source) => this.controls.hold(keys, source),
    after: (run, ms) => window.setTimeout(run, ms),
    cancel: (timer) => clearTimeout(timer),
  });
  private readonly voice = new VoiceButton(this.url("duplex"), {
    onStep: (step) => this.steer(step),
    onEnd: () => this.steering.halt(),
    onNote: (text, tone) => this.view.say(text, tone),
  });
  private readonly connection = new Connection(this.url("world"), () => apiKey.get(), {
    onLink: (link) => this.linkChanged(link),
    onMessage: (message) => this.received(message),
    onFrame: (frame) => { this.player.push(frame); },
    onBytes: (bytes) => this.bytes.add(performance.now(), bytes),
    onBroken: (reason) => this.log(`protocol: ${reason}`),
  });
  private readonly returning = new Returning({
    answers: () => serverAnswers(this.base),
    onBack: () => void this.serverIsBack(),
  });
  private readonly frames = new RateMeter();
  private readonly bytes = new RateMeter();
  private readonly latency = new LatencyMeter();
  private format: Format = "jpeg";
  private track: string | null = null;
  private lastFrame: Frame | null = null;
  private lastChunk: Chunk | null = null;
  private lostAt: number | null = null; // when the connection of a walk that goes on was lost
  private pausedByPage = false;
  private leaving = false;
  private walked = false;
  private turned = false;
  private walkedFrames = 0;
  private errors: string[] = [];
  private readonly startedAt = performance.now();

  constructor(private readonly options: AppOptions) {
    this.entrance = new Entrance(
      this.base, this.view, this.panel, options.model, (models) => this.voice.offer(models), (text) => this.log(text),
    );
    byId("pause").addEventListener("click", () => this.togglePause());
    askingForm("first-form", (prompt) => this.prompt(prompt));
    byId("full").addEventListener("click", () => void toggleFullScreen());
    document.addEventListener("visibilitychange", () => this.visibilityChanged());
    window.addEventListener("pagehide", () => this.keepSession());
    window.addEventListener("pageshow", () => { this.leaving = false; });
    setInterval(() => this.refreshStrip(), 250);
    this.picture.clear();
    this.panel.enable(false);
    document.body.toggleAttribute("data-debug", options.debug);
  }

  async begin(): Promise<void> {
    this.returning.stop();
    this.view.show(OPENING);
    this.format = this.options.format ?? (await preferredFormat());
    if (!(await this.entrance.find())) return;
    const item = keptSession.take();
    if (item && (!this.options.model || item.saved.started.model === this.options.model)) {
      const machine = WorldMachine.restore(item.saved);
      this.pausedByPage = item.pausedByPage;
      this.settle(machine.session!);
      this.connection.comeBack(machine, this.format);
    } else void this.renew();
  }

  debug() {
    return {
      stats: () => ({
        ...this.machine.statistics(), sessionId: this.machine.session?.session_id ?? null, prompt: this.machine.prompt,
        format: this.machine.format, lastFrameIndex: this.lastFrame?.frame ?? null, shownFrames: this.player.shownFrames,
        waiting: this.player.waiting, chunkIndex: this.machine.chunkIndex, fps: this.frames.perSecond(performance.now()),
        appliedEventId: this.lastFrame?.appliedEventId ?? null, latencyMs: this.latency.median, lastLatencyMs: this.latency.last,
        oldestRewind: this.machine.oldestRewind, branch: this.two.stats(), voice: this.voice.stats(),
        keys: this.controls.held.keys(), tickMs: this.lastChunk?.timings_ms.tick ?? null, errors: [...this.errors],
      }),
      /** Cuts the socket as a lost network would. */
      cut: () => this.connection.reconnect(),
      breakDecoder: () => this.fallBack("asked by a test"),
      /** The world in its own size. */
      world: this.picture.world,
      branchWorld: this.two.branch.picture.world,
    };
  }

  private get machine(): WorldMachine { return this.connection.machine; }
  private url(of: "world" | "duplex"): string {
    return `${location.origin.replace(/^http/, "ws")}${this.base}/v1/${of === "world" ? "realtime/world" : of}`;
  }
  private get base(): string { return new URL(".", document.baseURI).pathname.replace(/\/$/, ""); }
  private get live(): boolean { return ["live", "paused"].includes(this.machine.phase); }

  // ------------------------------------------------------------------------------------------------ what the user wants

  private useKey(key: string): void {
    apiKey.set(key);
    void this.begin();
  }

  private async renew(): Promise<void> {
    if (!this.panel.seedIsValid()) return;
    this.returning.stop();
    this.two.backToOne();
    if (this.live || this.machine.phase === "failed") this.connection.send(this.machine.command("session.close"));
    keptSession.forget();
    this.stopShowing();
    this.entrance.show();
    this.view.show(OPENING);
    const options = await startOptions(this.panel, this.entrance.model, this.format, this.machine.session);
    this.connection.start(options);
  }

  /** A new session on a server that may have changed since this page asked it what it has. */
  private async again(): Promise<void> {
    if (!this.panel.seedIsValid()) return;
    this.returning.stop();
    this.view.show(OPENING);
    if (await this.entrance.find()) await this.renew();
  }

  private async reset(): Promise<void> {
    if (!this.panel.seedIsValid()) return;
    if (!this.live && this.machine.phase !== "failed") return void this.renew();
    this.two.backToOne();
    const { choice } = this.panel;
    let options;
    try {
      options = await resetOptions(this.panel, this.machine.session!);
    } catch {
      this.panel.takeBack(choice);
      return this.view.say(sentence("image_invalid"), "bad");
    }
    if (choice !== this.panel.choice) return this.panel.overtaken(choice); // something else was chosen meanwhile
    if (this.live || this.machine.phase === "failed") this.connection.send(this.machine.reset(options));
  }

  private prompt(prompt: string): void {
    if (!this.live && !this.machine.canResume) return;
    const { message } = this.machine.event({ prompt }); // kept by the machine while the connection is lost
    if (this.live) this.connection.send(message);
    this.view.say(`Going there: ${prompt}`);
  }

  /** `pressedAt` is when the user did it; null for what the page sends again of its own, which measures nothing. */
  private sendKeys(pressedAt: number | null): void {
    if (this.track === null) return;
    const tMs = Math.max(0, Math.round((pressedAt ?? performance.now()) - this.startedAt));
    const held = this.two.share(this.track, this.controls.held.keys(), tMs);
    if (!this.live) return;
    const { message, eventId } = this.machine.heldKeys(this.track, held, tMs);
    if (this.connection.send(message) && pressedAt !== null) this.latency.sent(eventId, pressedAt);
  }

  /** What a voice asks for; what it is to know of it. */
  private steer(step: Step): string {
    if (step.kind === "halt") this.steering.take(step); // in a pause, too: what it held would go on after it
    else if (this.machine.phase !== "live") return "The world stands still now.";
    else if (step.kind === "place") this.prompt(step.prompt);
    else if (step.kind === "hold" && !this.controls.knows(step.keys)) return "This world has no such way to go.";
    else this.steering.take(step);
    return "ok";
  }

  private togglePause(): void {
    if (!this.live) return;
    const paused = this.machine.phase === "paused";
    this.connection.send(this.machine.command(paused ? "session.resume_play" : "session.pause"));
    this.two.branch.pause(!paused);
    this.pausedByPage = false;
  }

  private shortcut(name: Shortcut): void {
    switch (name) {
      case "prompt": return this.panel.focusPrompt();
      case "pause": return this.togglePause();
      case "back": return this.two.goBack();
      case "fork": return this.two.fork();
      case "voice": return this.voice.toggle();
    }
  }

  /** The branch of a "what if" is the walk to keep. */
  private goOnWith(machine: WorldMachine, branch: WorldPicture): void {
    this.player.flush(machine.epoch);
    this.picture.draw(branch.world);
    this.close();
    this.latency.forget();
    if (machine.session && machine.canResume) this.connection.comeBack(machine, this.machine.format);
    else void this.renew();
  }

  private end(): void {
    this.two.backToOne();
    this.close();
  }

  private close(): void {
    if (this.live || this.machine.phase === "failed") this.connection.send(this.machine.command("session.close"));
  }

  private act(action: Action): void {
    switch (action) {
      case "retry": return this.machine.session ? this.connection.retryNow() : void this.begin();
      case "restart": return void this.again();
      case "rollback": return void this.connection.send(this.machine.command("session.rollback"));
      case "reset": return void this.reset();
      case "close": return this.end();
      case "play": return this.togglePause();
      default: return;
    }
  }

  /** A hidden page shows nothing, so it asks for nothing; it plays on when it is seen again. */
  private visibilityChanged(): void {
    if (document.hidden && this.machine.phase === "live" && !this.leaving) {
      this.pausedByPage = this.connection.send(this.machine.command("session.pause"));
      this.two.branch.pause(true);
    } else if (!document.hidden && this.pausedByPage) {
      if (this.live) this.connection.send(this.machine.command("session.resume_play"));
      this.two.branch.pause(false);
      this.pausedByPage = false;
    }
  }

  // ------------------------------------------------------------------------------------------------ what happens

  private received(message: ServerMessage): void {
    switch (message.type) {
      case "session.started":
        this.lostAt = null;
        this.player.stop();
        this.two.past.clear();
        this.panel.began(message.re);
        this.worked();
        this.settle(message);
        return this.playing();
      case "session.resumed":
        this.lostAt = null;
        if (this.settle(this.machine.session!)) this.machine.skipToReceived();
        this.connection.send(this.machine.ack());
        for (const event of this.machine.unansweredEvents()) this.connection.send(event);
        this.sendKeys(null); // what the server believes to be held was released with the connection
        if (this.machine.phase === "failed") return;
        return this.machine.phase === "paused" ? this.paused() : this.playing();
      case "chunk":
        this.lastChunk = message;
        this.player.blockArrived(performance.now());
        return;
      case "event.accepted":
        if (!message.prompt) return;
        this.worked();
        return this.view.say(`Going there: ${message.prompt}`);
      case "session.paused": return this.paused();
      case "session.playing":
      case "session.recovered": return this.playing();
      case "session.reset_done":
        this.player.flush(message.epoch);
        this.latency.forget();
        this.two.past.clear();
        this.panel.began(message.re);
        this.worked();
        this.panel.showSeed(message.seed);
        this.place();
        return this.machine.phase === "paused" ? undefined : this.playing();
      case "session.rewound": return this.wentBack(message);
      case "session.forked":
        this.worked();
        return this.two.split(message);
      case "session.failed":
        this.controls.enabled = false;
        this.controls.releaseAll();
        this.view.link("Stopped", "bad");
        return this.view.show(failedNotice(message.code, message.message, message.can));
      case "session.closed":
        return this.ended(message.reason, message.code ?? null, message.message ?? null);
      case "error": return this.refused(message);
      default: return;
    }
  }

  /** Takes over what a started or resumed session says about itself; true when frames that waited to be shown were lost. */
  private settle(session: Started): boolean {
    const held = session.controls.find(({ schema }) => schema === HELD_KEYS_SCHEMA);
    this.track = held?.track ?? null;
    this.controls.offer(held ? keysOf(held.json_schema) : new Set());
    const renewed = this.player.configure({
      format: this.machine.format, codec: this.machine.codec, width: session.width, height: session.height,
      fps: session.fps, framesPerBlock: session.frames_per_block,
    });
    this.entrance.model = session.model;
    byId("model-name").textContent = session.model;
    byId<HTMLSelectElement>("model").value = session.model;
    if (session.prompts.length > 0) this.panel.prompts(session.prompts);
    if (!this.entrance.worlds.some(({ name }) => name === session.model)) {
      this.panel.starts(session.starts.map((name) => startOf(session.model, name, this.base)), true);
    }
    this.panel.showSeed(this.machine.seed);
    this.panel.facts({
      model: session.model, session: session.session_id, picture: `${session.width}×${session.height}, ${this.machine.format}`,
      pace: `${session.fps} frames/s, ${session.frames_per_block} a block`, seed: String(this.machine.seed),
    });
    this.place();
    return renewed;
  }

  private wentBack(rewound: Rewound): void {
    this.player.flush(rewound.epoch);
    this.latency.forget();
    this.two.wentBack(rewound);
    this.worked();
    this.place();
    this.sendKeys(null); // the world holds the keys of that moment: what is held now rules
    if (this.machine.phase === "paused") this.view.hide();
    else this.playing();
  }

  private worked(): void {
    this.view.worked();
    this.panel.worked();
  }

  private playing(): void {
    this.controls.enabled = true;
    this.player.restartBeat();
    this.panel.enable(true);
    this.view.link("Live", "good");
    this.pauseButton(false);
    if (this.lastFrame?.epoch === this.machine.epoch) this.view.hide(); // else the first picture will
  }

  private paused(): void {
    if (this.pausedByPage && !document.hidden) return this.visibilityChanged(); // seen again before the pause was answered
    this.pauseButton(true);
    this.panel.enable(true);
    this.view.link("Paused", "busy");
    if (!document.hidden) {
      this.view.show({ title: "Paused", text: "The world waits.", actions: ["play"], tone: "good" }, { focus: true });
    }
  }

  private pauseButton(paused: boolean): void {
    const button = byId("pause");
    button.setAttribute("aria-pressed", String(paused));
    button.title = paused ? "Walk on (P)" : "Pause (P)";
    button.querySelector("use")!.setAttribute("href", paused ? "#i-play" : "#i-pause");
  }

  private shown(frame: Frame, now: number): void {
    if (!this.machine.displayed(frame)) return;
    this.lastFrame = frame;
    this.frames.add(now);
    this.latency.shown(frame.appliedEventId, now);
    if (["live", "paused", "failed"].includes(this.machine.phase)) this.connection.send(this.machine.ack());
    if (this.machine.phase === "live") this.view.hide();
    this.view.hint(this.hintNow());
    if (frame.last) this.two.past.shown(frame.chunkIndex, this.picture.world, this.machine.oldestRewind);
    this.two.refresh();
    this.place();
  }

  /** How to walk, until the first key; then how to turn, should someone walk straight on and on. */
  private hintNow(): Hint {
    if (this.track === null) return "none";
    if (!this.walked) return "walk";
    if (this.controls.held.keys().length > 0) this.walkedFrames += 1;
    return !this.turned && this.walkedFrames > STRAIGHT_ON_S * this.machine.session!.fps ? "turn" : "none";
  }

  private place(): void {
    this.view.place(this.machine.prompt);
    this.panel.here(this.machine.prompt);
  }

  private refused(error: ServerError): void {
    this.log(`${error.code}: ${error.message}`);
    if (error.code === "image_invalid" || error.code === "invalid_argument") this.panel.takeBack(error.re ?? undefined);
    if (error.code === "prompt_unknown") this.panel.promptRefused();
    if (error.code === "not_retained" && this.two.notRetained()) return;
    if (this.live && !error.fatal) {
      this.view.say(explain(error.code, error.message), "bad");
      if (error.code === "queue_full" || error.code === "rate_limited") setTimeout(() => this.sendKeys(null), 300);
      return;
    }
    if (this.machine.session && !OVER.has(error.code)) return; // the connection closes, and comes back
    keptSession.forget();
    this.connection.drop();
    this.connection.machine = new WorldMachine();
    this.stopShowing();
    if (error.code === "model_unknown") this.entrance.forget();
    if (error.code === "shutdown") return this.ended("shutdown", null, null);
    this.view.show(errorNotice(error.code, error.message));
  }

  private ended(reason: string, code: string | null, message: string | null): void {
    keptSession.forget();
    this.stopShowing();
    this.view.link("Ended", "bad");
    this.view.show(closedNotice(reason, code, message));
    if (reason === "shutdown") this.returning.begin();
  }

  private async serverIsBack(): Promise<void> {
    if (!(await this.entrance.find())) return;
    this.view.link("Ready", "good");
    this.view.show(BACK);
  }

  private stopShowing(): void {
    this.two.past.clear();
    this.controls.enabled = false;
    this.controls.releaseAll();
    this.player.flush();
    this.latency.forget();
    this.panel.enable(false);
    this.lastFrame = null;
  }

  private linkChanged(link: Link): void {
    const resuming = this.machine.session !== null && this.machine.phase !== "closed";
    if (this.machine.phase === "closed") return;
    const { text, tone } = linkText(link, resuming);
    if (link.state !== "open") this.view.link(text, tone);
    if (link.state === "waiting") {
      const now = performance.now();
      if (resuming) this.lostAt ??= now;
      this.controls.enabled = false;
      this.controls.releaseAll();
      this.latency.forget();
      if (!link.everOpened && link.attempt > 1) void this.askWhy();
      if (resuming && link.attempt === 1) return; // usually back before anyone notices
      const keptS = resuming ? this.machine.session!.limits.grace_s : null;
      this.view.show(waitingNotice(link.retryInMs, now - (this.lostAt ?? now), keptS, this.entrance.reachable));
    }
  }

  /** A browser hides why an upgrade was refused; the same server's HTTP side tells: a key is wanted, or nobody is there. */
  private async askWhy(): Promise<void> {
    if (!(await this.entrance.find())) this.connection.drop();
  }

  /** The decoder can't go on: the same session, in a format that any browser shows. */
  private fallBack(reason: string): void {
    this.log(`decoder: ${reason}`);
    if (this.machine.format !== "h264") {
      this.view.show(errorNotice("unsupported_format", reason));
      return;
    }
    this.format = "jpeg";
    this.connection.reconnect("jpeg");
  }

  private keepSession(): void {
    this.leaving = true; // browsers hide a page after they leave it: that is not the moment to pause
    const saved = this.machine.save();
    if (saved) keptSession.put({ saved, pausedByPage: this.pausedByPage });
  }

  private log(text: string): void {
    this.errors = [...this.errors.slice(-19), text];
    if (this.options.debug) console.info(`realtime_omni: ${text}`);
  }

  private refreshStrip(): void {
    const now = performance.now();
    const { machine, lastChunk: chunk, view } = this;
    view.strip("fps", machine.phase === "live" ? this.frames.perSecond(now).toFixed(1) : "–");
    view.strip("tick", chunk ? `${Math.round(chunk.timings_ms.tick)} ms` : "–");
    view.strip("latency", this.latency.median === null ? "–" : `${Math.round(this.latency.median)} ms`);
    view.strip("chunk", machine.chunkIndex === null ? "–" : String(machine.chunkIndex));
    view.strip("kv", chunk ? `${chunk.kv.pages_used}/${chunk.kv.pages_total}` : "–");
    view.strip("events", `${machine.appliedEvents}/${machine.acceptedEvents}`);
    view.strip("bytes", `${(this.bytes.perSecond(now) / 1000).toFixed(0)} kB/s`);
    view.strip("rtt", this.connection.rttMs === null ? "–" : `${Math.round(this.connection.rttMs)} ms`);
  }
}
