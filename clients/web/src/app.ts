// The page's middle: one connection, one player, one set of controls, and what each tells the others.

import { Branch } from "./branch";
import { apiKey, fetchModels, KeyWanted, packPicture, Refused, startOf, type ModelInfo } from "./api";
import { Connection, type Link } from "./connection";
import { Controls, type Shortcut } from "./controls";
import { preferredFormat } from "./decoder";
import { byId } from "./dom";
import { keysOf } from "./held";
import { keptSession } from "./kept";
import { WorldMachine, type ResetOptions, type StartOptions } from "./machine";
import { closedNotice, errorNotice, explain, failedNotice, type Action } from "./messages";
import { LatencyMeter, RateMeter } from "./meters";
import { Panel, promptOf } from "./panel";
import { Past } from "./past";
import { WorldPicture } from "./picture";
import { Player } from "./player";
import { HELD_KEYS_SCHEMA, type Chunk, type Forked, type Format, type Frame, type Rewound, type ServerError, type ServerMessage, type Started } from "./protocol";
import { showTabs } from "./tabs";
import { linkText, View, type Hint } from "./view";

export interface AppOptions { format: Format | null; model: string | null; debug: boolean }

const START_PICTURE_BYTES = 3_000_000; // a session.start may be 4 MiB
const BACK_S = 1; // how far the button goes back
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
    onRenew: () => void this.renew(),
    onClose: () => this.end(),
    onModel: (name) => { this.model = name; this.panel.beginning = null; void this.renew(); },
  });
  private readonly branch = new Branch(this.url, () => apiKey.get(), (text) => this.log(text));
  private readonly past = new Past((nextChunk) => {
    this.backBlocks = 0;
    this.rewind(nextChunk);
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
  private readonly connection = new Connection(this.url, () => apiKey.get(), {
    onLink: (link) => this.linkChanged(link),
    onMessage: (message) => this.received(message),
    onFrame: (frame) => { this.player.push(frame); },
    onBytes: (bytes) => this.bytes.add(performance.now(), bytes),
    onBroken: (reason) => this.log(`protocol: ${reason}`),
  });
  private readonly frames = new RateMeter();
  private readonly bytes = new RateMeter();
  private readonly latency = new LatencyMeter();
  private models: ModelInfo[] = [];
  private model: string | null;
  private format: Format = "jpeg";
  private track: string | null = null;
  private lastFrame: Frame | null = null;
  private lastChunk: Chunk | null = null;
  private pausedByPage = false;
  private leaving = false;
  private walked = false;
  private turned = false;
  private walkedFrames = 0;
  private backBlocks = 0; // what the button asked for last
  private reachable = true;
  private errors: string[] = [];
  private readonly startedAt = performance.now();

  constructor(private readonly options: AppOptions) {
    this.model = options.model;
    byId("pause").addEventListener("click", () => this.togglePause());
    byId("back").addEventListener("click", () => this.goBack());
    byId("fork").addEventListener("click", () => this.fork());
    byId("keep").addEventListener("click", () => this.keepFirst());
    byId("branch-keep").addEventListener("click", () => this.keepBranch());
    for (const choice of keyChoices()) choice.addEventListener("change", () => this.chooseKeys());
    askingForm("first-form", (prompt) => this.prompt(prompt));
    askingForm("branch-form", (prompt) => this.branch.ask(prompt));
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
    this.view.show({ title: "Opening the world", text: "The first picture takes a moment.", actions: [], tone: "busy" });
    this.format = this.options.format ?? (await preferredFormat());
    if (!(await this.findModels())) return;
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
        oldestRewind: this.machine.oldestRewind, branch: this.branch.active ? this.branchStats() : null,
        keys: this.controls.held.keys(), tickMs: this.lastChunk?.timings_ms.tick ?? null, errors: [...this.errors],
      }),
      /** Cuts the socket as a lost network would. */
      cut: () => this.connection.reconnect(),
      breakDecoder: () => this.fallBack("asked by a test"),
      /** The world in its own size. */
      world: this.picture.world,
      branchWorld: this.branch.picture.world,
    };
  }

  private branchStats() {
    const { machine, shownFrames } = this.branch;
    return {
      ...machine.statistics(), sessionId: machine.session?.session_id ?? null, prompt: machine.prompt, shownFrames,
      chunkIndex: machine.chunkIndex,
    };
  }

  private get machine(): WorldMachine { return this.connection.machine; }
  private get url(): string { return `${location.origin.replace(/^http/, "ws")}${this.base}/v1/realtime/world`; }
  private get base(): string { return new URL(".", document.baseURI).pathname.replace(/\/$/, ""); }
  private get live(): boolean { return ["live", "paused"].includes(this.machine.phase); }

  // ------------------------------------------------------------------------------------------------ what the user wants

  private async findModels(): Promise<boolean> {
    try {
      const models = await fetchModels(this.base);
      showTabs(models);
      this.models = models.filter(({ makesWorlds }) => makesWorlds);
    } catch (error) {
      if (error instanceof KeyWanted) {
        const text = apiKey.get() ? "The server did not accept this key." : "The server wants an API key. It stays in this tab.";
        this.view.show({ title: "A key, please", text, actions: ["key"], tone: "bad" });
        this.view.link("Key wanted", "bad");
        return false;
      }
      if (error instanceof Refused) {
        this.view.show(errorNotice("origin_refused"));
        this.view.link("Refused", "bad");
        return false;
      }
      this.reachable = false;
      this.log(`models: ${String(error)}`); // the WebSocket may still work; it says more when it does not
      return true;
    }
    this.reachable = true;
    this.model ??= this.models[0]?.name ?? null;
    this.showModel();
    return true;
  }

  private showModel(): void {
    this.panel.models(this.models, this.model ?? "");
    const info = this.models.find(({ name }) => name === this.model);
    if (!info) return;
    this.panel.prompts(info.prompts);
    this.panel.starts(info.starts, info.takesImage);
  }

  private useKey(key: string): void {
    apiKey.set(key);
    void this.begin();
  }

  private async renew(): Promise<void> {
    if (!this.panel.seedIsValid()) return;
    this.backToOne();
    if (this.live || this.machine.phase === "failed") this.connection.send(this.machine.command("session.close"));
    keptSession.forget();
    this.stopShowing();
    this.showModel();
    this.view.show({ title: "Opening the world", text: "The first picture takes a moment.", actions: [], tone: "busy" });
    const options: StartOptions = { format: this.format };
    if (this.model) options.model = this.model;
    if (this.panel.seed !== undefined) options.seed = this.panel.seed;
    const { beginning } = this.panel;
    const { width, height } = this.machine.session ?? { width: 256, height: 256 };
    if (beginning && "start" in beginning) options.start = beginning.start;
    else if (beginning) options.image = await packPicture(beginning.picture, width, height, START_PICTURE_BYTES);
    this.connection.start(options);
  }

  private async reset(): Promise<void> {
    if (!this.panel.seedIsValid()) return;
    if (!this.live && this.machine.phase !== "failed") return void this.renew();
    this.backToOne();
    const options: ResetOptions = {};
    if (this.panel.seed !== undefined) options.seed = this.panel.seed;
    const { beginning } = this.panel;
    if (beginning && "start" in beginning) {
      options.start = beginning.start;
      // What a reset does not name stays as it was: without this, the picture of one place would turn into another.
      const prompt = promptOf(beginning.start, this.machine.session!.prompts);
      if (prompt !== null) options.prompt = prompt;
    } else if (beginning) {
      const { width, height, limits } = this.machine.session!;
      try {
        options.image = await packPicture(beginning.picture, width, height, limits.max_message_bytes - 1_024);
      } catch {
        return this.view.say(explain("image_invalid", ""), "bad");
      }
    }
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
    const held = this.controls.held.keys();
    if (this.branch.active) this.branch.hold(this.track, this.keysTo === "first" ? [] : held, tMs);
    if (!this.live) return;
    const { message, eventId } = this.machine.heldKeys(this.track, this.keysTo === "branch" ? [] : held, tMs);
    if (this.connection.send(message) && pressedAt !== null) this.latency.sent(eventId, pressedAt);
  }

  private togglePause(): void {
    if (!this.live) return;
    const paused = this.machine.phase === "paused";
    this.connection.send(this.machine.command(paused ? "session.resume_play" : "session.pause"));
    this.branch.pause(!paused);
    this.pausedByPage = false;
  }

  private shortcut(name: Shortcut): void {
    switch (name) {
      case "prompt": return this.panel.focusPrompt();
      case "pause": return this.togglePause();
      case "back": return this.goBack();
      case "fork": return this.fork();
    }
  }

  // ------------------------------------------------------------------------------------------------ going back, and what if

  private get canBranch(): boolean {
    return (this.live || this.machine.phase === "failed") && this.machine.oldestRewind !== null && !this.branch.active;
  }

  private goBack(): void {
    const { fps, frames_per_block } = this.machine.session ?? { fps: 1, frames_per_block: 1 };
    this.goBackBy(Math.max(1, Math.round((fps * BACK_S) / frames_per_block)));
  }

  private goBackBy(blocks: number): void {
    const moment = this.past.before(blocks);
    this.backBlocks = blocks;
    if (moment !== null) this.rewind(moment);
    else if (this.canBranch) this.view.say("There is nothing to go back to yet.");
  }

  private rewind(nextChunk: number): void {
    if (this.canBranch) this.connection.send(this.machine.rewind(nextChunk));
  }

  private fork(): void {
    if (this.canBranch) this.connection.send(this.machine.fork());
  }

  private split(forked: Forked): void {
    if (this.branch.active) return;
    this.branch.begin(this.machine.branch(forked), this.machine.format, this.picture.world);
    this.showTwo(true);
    this.sendKeys(null);
    byId<HTMLInputElement>("branch-prompt").focus({ preventScroll: true });
  }

  private keepFirst(): void {
    this.backToOne();
    this.view.say("The other branch is closed.");
  }

  /** The branch becomes the walk: its session moves to the page's first connection. */
  private keepBranch(): void {
    const machine = this.branch.release();
    machine.skipToReceived(); // frames that waited in the branch's player
    this.player.flush(machine.epoch);
    this.picture.draw(this.branch.picture.world);
    this.close();
    this.past.clear();
    this.latency.forget();
    this.showTwo(false);
    if (machine.session && machine.canResume) this.connection.comeBack(machine, this.machine.format);
    else void this.renew();
  }

  private backToOne(): void {
    this.branch.end();
    this.showTwo(false);
  }

  private showTwo(two: boolean): void {
    document.body.toggleAttribute("data-two", two);
    for (const id of ["branch-pane", "keys-to", "first-foot"]) byId(id).hidden = !two;
    byId<HTMLInputElement>("keys-both").checked = true;
    this.chooseKeys();
    this.refreshBack();
  }

  private get keysTo(): string {
    return keyChoices().find(({ checked }) => checked)!.value;
  }

  private chooseKeys(): void {
    byId("world").toggleAttribute("data-keys", this.keysTo !== "branch");
    byId("branch-world").toggleAttribute("data-keys", this.keysTo !== "first");
    if (this.branch.active) this.sendKeys(null); // who loses the keys lets them go
  }

  private refreshBack(): void {
    byId("fork").hidden = byId("back").hidden = this.machine.oldestRewind === null || this.branch.active;
    byId("past").toggleAttribute("inert", this.branch.active);
  }

  private end(): void {
    this.backToOne();
    this.close();
  }

  private close(): void {
    if (this.live || this.machine.phase === "failed") this.connection.send(this.machine.command("session.close"));
  }

  private act(action: Action): void {
    switch (action) {
      case "retry": return this.machine.session ? this.connection.retryNow() : void this.begin();
      case "restart": return void this.renew();
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
      this.branch.pause(true);
    } else if (!document.hidden && this.pausedByPage) {
      if (this.live) this.connection.send(this.machine.command("session.resume_play"));
      this.branch.pause(false);
      this.pausedByPage = false;
    }
  }

  // ------------------------------------------------------------------------------------------------ what happens

  private received(message: ServerMessage): void {
    switch (message.type) {
      case "session.started":
        this.player.stop();
        this.past.clear();
        this.settle(message);
        return this.playing();
      case "session.resumed":
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
        if (message.prompt) this.view.say(`Going there: ${message.prompt}`);
        return;
      case "session.paused": return this.paused();
      case "session.playing":
      case "session.recovered": return this.playing();
      case "session.reset_done":
        this.player.flush(message.epoch);
        this.latency.forget();
        this.past.clear();
        this.panel.showSeed(message.seed);
        this.place();
        return this.machine.phase === "paused" ? undefined : this.playing();
      case "session.rewound": return this.wentBack(message);
      case "session.forked": return this.split(message);
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
    this.model = session.model;
    byId("model-name").textContent = session.model;
    byId<HTMLSelectElement>("model").value = session.model;
    if (session.prompts.length > 0) this.panel.prompts(session.prompts);
    if (!this.models.some(({ name }) => name === session.model)) {
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
    this.backBlocks = 0;
    this.player.flush(rewound.epoch);
    this.latency.forget();
    const picture = this.past.backTo(rewound.chunk_index);
    if (picture) this.picture.draw(picture);
    this.place();
    this.sendKeys(null); // the world holds the keys of that moment: what is held now rules
    if (this.machine.phase === "paused") this.view.hide();
    else this.playing();
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
    if (frame.last) this.past.shown(frame.chunkIndex, this.picture.world, this.machine.oldestRewind);
    this.refreshBack();
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
    if (error.code === "not_retained" && this.backBlocks > 1) {
      return this.goBackBy(Math.floor(this.backBlocks / 2)); // the server went on, and forgot, while we asked
    }
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
    this.view.show(errorNotice(error.code, error.message));
  }

  private ended(reason: string, code: string | null, message: string | null): void {
    keptSession.forget();
    this.stopShowing();
    this.view.link("Ended", "bad");
    this.view.show(closedNotice(reason, code, message));
  }

  private stopShowing(): void {
    this.past.clear();
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
      this.controls.enabled = false;
      this.controls.releaseAll();
      this.latency.forget();
      if (!link.everOpened && link.attempt > 1) void this.askWhy();
      if (resuming && link.attempt === 1) return; // usually back before anyone notices
      const title = resuming ? "Reconnecting" : this.reachable ? "The server takes no one in now" : "The server does not answer";
      const wait = `Next try in ${Math.max(1, Math.round(link.retryInMs / 1000))} s.`;
      this.view.show({ title, text: resuming ? `Your walk is kept. ${wait}` : wait, actions: ["retry"], tone: "busy" });
    }
  }

  /** A browser hides why an upgrade was refused; the same server's HTTP side tells: a key is wanted, or nobody is there. */
  private async askWhy(): Promise<void> {
    if (!(await this.findModels())) this.connection.drop();
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

function keyChoices(): HTMLInputElement[] {
  return [...document.querySelectorAll<HTMLInputElement>('input[name="keys-to"]')];
}

/** A line to describe a place in, under one of two pictures. */
function askingForm(id: string, onPrompt: (prompt: string) => void): void {
  const form = byId<HTMLFormElement>(id);
  const input = form.querySelector("input")!;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const prompt = input.value.trim();
    if (prompt === "") return;
    onPrompt(prompt);
    input.blur(); // back to walking
  });
}

async function toggleFullScreen(): Promise<void> {
  if (document.fullscreenElement) await document.exitFullscreen();
  else await document.documentElement.requestFullscreen().catch(() => undefined);
}
