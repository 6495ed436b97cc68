// The Talk page's middle: one call, one sound, one screen, and what each tells the others.

import { apiKey, fetchModels, KeyWanted, Refused, serverAnswers, type ModelInfo, type Voice } from "../api";
import { Returning } from "../returning";
import { showTabs } from "../tabs";
import { Captions } from "./captions";
import { toBase64, type VoiceEvent } from "./events";
import { HOLD_TO_TALK, MICROPHONE_GONE, NO_MICROPHONE, notice, sentence, SILENT_MICROPHONE, TEXT_ONLY, WRONG_RATE } from "./messages";
import type { Question } from "./questions";
import { ANY_DEVICE, Screen, type Floor, type Mode } from "./screen";
import { CallSocket, type CallLink } from "./socket";
import { Sound, SoundError } from "./sound";
import { Timing } from "./timing";
import { WIRE_RATE, type MicrophoneTold, type SpeakerTold } from "./worklet-messages";

const ACK_EVERY_MS = 200;
const REFRESH_MS = 50;
const SHORTEST_PRESS_MS = 200; // shorter, nothing can have been said
const METER_FALL = 0.8; // a refresh
const SHUTDOWN = "server_shutdown"; // why a server that stops closes the socket
const LINKS = { connecting: ["Connecting", "busy"], open: ["Live", "good"], waiting: ["Reconnecting", "busy"], off: ["Not connected", "idle"] } as const;

export class Talk {
  private readonly screen = new Screen({
    onBegin: (microphone) => void this.begin(microphone),
    onMode: (mode) => this.changeMode(mode),
    onTalk: (down) => this.talk(down),
    onStop: () => this.stop(),
    onEnd: () => this.end(),
    onQuestion: (question) => void this.ask(question),
    onText: (text) => this.type(text),
    onMicrophone: (id) => void this.chooseMicrophone(id),
    onSpeaker: (id) => void this.sound.useSpeaker(id).catch(() => this.screen.note("That speaker can't be used.")),
    onKey: (key) => { apiKey.set(key); void this.find(); },
  });
  private readonly sound = new Sound({
    onPacket: (packet) => this.packet(packet),
    onSpeaker: (told) => this.played(told),
    onMicrophoneLost: () => { this.sound.deafen(); this.showTalk(); this.screen.note(MICROPHONE_GONE); },
    onDevices: () => void this.showDevices(),
  });
  private readonly socket = new CallSocket(this.url, () => apiKey.get(), {
    onLink: (link) => this.linked(link),
    onEvent: (event) => this.received(event),
    onGone: (why, detail) => void this.gone(why, detail),
  });
  private readonly returning = new Returning({
    answers: () => serverAnswers(this.base),
    onBack: () => void this.serverIsBack(),
  });
  private model: ModelInfo | null = null;
  private timing = new Timing();
  private captionsOf = new Captions();
  private mode: Mode = "free";
  private muted = false;
  private pressed = false;
  private pressedAt = 0;
  private live = false;
  private paddingMs = 0;
  private hearing: string | null = null; // item of what the user is saying
  private answering = false;
  private sounding = false;
  private stopping = false; // the user has stopped an answer, and the server does not know it yet
  private spoken = new Set<string>(); // items that came with sound
  private cut: string | null = null; // an item that was interrupted and whose heard part is not known yet
  private ackedAt = 0;
  private levels = { you: 0, voice: 0 };
  private speaker: SpeakerTold | null = null;
  private microphoneId: string | null = null; // that the user chose
  private pending: Question | null = null; // asked before the call was there
  private readonly counts = { packets: 0, sounds: 0, flushes: 0, answers: 0, interruptions: 0 };

  constructor() {
    setInterval(() => this.refresh(), REFRESH_MS);
    window.addEventListener("pagehide", () => this.end());
  }

  /** Who is here to talk to. */
  async find(): Promise<boolean> {
    try {
      const models = await fetchModels(this.base);
      showTabs(models);
      this.model = models.find(({ voice }) => voice) ?? null;
    } catch (error) {
      this.screen.link(error instanceof KeyWanted ? "Key wanted" : "No connection", "bad");
      if (error instanceof KeyWanted) this.screen.askKey(apiKey.get() ? "The server did not accept this key." : "The server wants an API key. It stays in this tab.");
      else this.screen.card(notice(error instanceof Refused ? "origin_refused" : "unreachable"));
      if (!(error instanceof KeyWanted || error instanceof Refused)) this.returning.begin();
      return false;
    }
    if (!this.model) {
      this.screen.card({ title: "No voice here", text: "The model of this server makes no speech." });
      return false;
    }
    this.screen.model(this.model.name, this.voice.takes_text);
    this.screen.phase("idle");
    this.screen.card({ title: "Talk with it", text: "It listens while it speaks: interrupt it when you like. Headphones help." });
    return true;
  }

  debug() {
    return {
      stats: () => ({
        ...this.counts, live: this.live, mode: this.mode, floor: this.floor, sounding: this.sounding, gaps: this.speaker?.gaps ?? 0,
        waitingMs: this.speaker?.waitingMs ?? 0, firstAudioMs: this.timing.firstAudioMs, bargeInMs: this.timing.bargeInMs,
        levels: { ...this.levels }, lines: this.captionsOf.lines.map((line) => ({ ...line })), microphone: this.sound.hasMicrophone,
      }),
      /** Cuts the socket as a lost network would. */
      cut: () => this.socket.cut(),
    };
  }

  private get base(): string { return new URL(".", document.baseURI).pathname.replace(/\/$/, ""); }
  private get url(): string { return `${location.origin.replace(/^http/, "ws")}${this.base}/v1/duplex`; }
  private get voice(): Voice { return this.model!.voice!; }

  // ------------------------------------------------------------------------------------------------ what the user wants

  private async begin(microphone: boolean): Promise<void> {
    this.screen.phase("opening");
    try {
      await this.sound.open();
      if (microphone) await this.sound.listen(this.microphoneId);
    } catch (error) {
      return this.fail(error);
    }
    this.returning.stop();
    if (!this.model && !(await this.find())) return;
    this.timing = new Timing();
    this.captionsOf = new Captions();
    this.screen.captions([]);
    this.muted = this.pressed = this.answering = this.stopping = this.sounding = false;
    this.hearing = this.cut = null;
    this.socket.start();
  }

  private async fail(error: unknown): Promise<void> {
    const code = error instanceof SoundError ? error.code : "insecure";
    this.screen.phase("idle");
    if (code !== "not_loaded" || (await this.find())) this.screen.card(notice(code));
  }

  private end(): void {
    if (!this.live) return;
    this.socket.send({ type: "session.close" });
    this.over("client");
  }

  private over(code: string, detail = ""): void {
    this.live = false;
    this.socket.drop();
    this.sound.close();
    this.screen.phase("idle");
    this.screen.card(notice(code), detail);
    if (code === SHUTDOWN || code === "lost") this.returning.begin();
  }

  private async serverIsBack(): Promise<void> {
    if (!(await this.find())) return;
    this.screen.link("Ready", "good");
    this.screen.card(notice("back"));
  }

  private changeMode(mode: Mode): void {
    if (this.pressed) this.talk(false);
    this.mode = mode;
    if (this.hearing !== null) this.captionsOf.userSaid(this.hearing, ""); // what was half said belongs to no turn
    this.hearing = null;
    this.socket.send({ type: "input_audio_buffer.clear" });
    this.configure();
    this.openEars();
  }

  private talk(down: boolean): void {
    if (!this.live) return;
    if (this.mode === "free") {
      if (!down) return;
      if (!this.sound.hasMicrophone) return void this.chooseMicrophone(ANY_DEVICE);
      this.muted = !this.muted;
    } else if (down !== this.pressed) {
      this.pressed = down;
      if (down) this.takeFloor();
      else this.giveFloor();
    }
    this.openEars();
  }

  private openEars(): void {
    this.sound.hear(this.mode === "push" ? this.pressed : !this.muted);
    this.showTalk();
  }

  /** Push to talk: whatever it says stops, and what is heard from now on is the user's turn. */
  private takeFloor(): void {
    this.pressedAt = performance.now();
    this.timing.interrupts(this.pressedAt, this.sounding);
    this.stop();
    this.socket.send({ type: "input_audio_buffer.clear" });
  }

  private giveFloor(): void {
    if (performance.now() - this.pressedAt < SHORTEST_PRESS_MS) return this.screen.note(HOLD_TO_TALK);
    if (!this.takesTurns) return; // the model hears silence and ends the turn by itself
    this.timing.userEnded(performance.now());
    this.socket.send({ type: "input_audio_buffer.commit" });
    this.socket.send({ type: "response.create" });
  }

  private stop(): void {
    if (!this.live) return;
    this.socket.send({ type: "barge_in" });
    this.stopping = this.answering;
    this.flush();
  }

  private async ask(question: Question): Promise<void> {
    if (!this.live) {
      this.pending = question;
      return this.begin(false);
    }
    if (this.mode === "push") this.talk(true);
    this.sound.hear(true);
    try {
      await this.sound.play(`./questions/${question.name}.mp3`);
    } catch {
      this.screen.note(notice("no_recording").title);
    }
    if (this.mode === "push") this.talk(false);
    else this.openEars();
  }

  private type(text: string): void {
    const id = `typed_${this.counts.answers}_${this.captionsOf.lines.length}`;
    this.stop();
    this.captionsOf.userSaid(id, text);
    this.socket.send({ type: "conversation.item.create", item: { type: "message", role: "user", content: [{ type: "input_text", text }] } });
    this.socket.send({ type: "response.create" });
  }

  private async chooseMicrophone(id: string): Promise<void> {
    this.microphoneId = id === ANY_DEVICE ? null : id || null;
    try {
      if (id) await this.sound.listen(this.microphoneId);
      else this.sound.deafen();
    } catch (error) {
      this.screen.note(notice((error as SoundError).code).title);
    }
    this.openEars();
  }

  // ------------------------------------------------------------------------------------------------ what the server says

  private received(event: VoiceEvent): void {
    const now = performance.now();
    switch (event.kind) {
      case "created": return this.begun();
      case "updated": this.paddingMs = event.paddingMs; return;
      case "heard":
        this.hearing = event.itemId;
        this.captionsOf.begin(event.itemId, "user");
        return this.timing.userBegan(event.startMs + this.paddingMs, this.sounding);
      case "silent":
        this.hearing = null;
        return this.timing.userEnded(now);
      case "committed": this.captionsOf.begin(event.itemId, "user"); return;
      case "words": return this.captionsOf.words(event.itemId, event.who, event.text);
      case "text": return event.who === "user" ? this.captionsOf.userSaid(event.itemId, event.text) : this.captionsOf.heard(event.itemId, event.text);
      case "answering": this.answering = true; return;
      case "sound":
        this.counts.sounds += 1;
        this.spoken.add(event.itemId);
        if (!this.stopping) this.sound.say(event.itemId, event.samples);
        return;
      case "answered": return this.answered(event.status, event.itemIds);
      case "trouble":
        if (event.what === "wrong_rate") this.screen.note(WRONG_RATE);
        else if (this.sound.hasMicrophone && !this.muted && this.mode === "free") this.screen.note(SILENT_MICROPHONE);
        return;
      case "error": return this.screen.note(sentence(event.code, event.message));
      case "closed": return this.over(event.reason);
      case "resumable": case "resumed": case "call": return;
    }
  }

  private begun(): void {
    this.live = true;
    this.configure();
    this.screen.phase("live");
    this.openEars();
    void this.showDevices();
    const { pending } = this;
    this.pending = null;
    if (pending) void this.ask(pending);
    else if (!this.sound.hasMicrophone) this.screen.note(NO_MICROPHONE);
  }

  private get takesTurns(): boolean { return this.voice.turn_modes.includes("client"); }

  private configure(): void {
    const detection = this.mode === "push" && this.takesTurns ? null
      : this.voice.turn_modes[0] === "semantic" ? { type: "semantic_vad" } : { type: "server_vad" };
    const input = { transcription: { model: this.model!.name }, turn_detection: detection };
    this.socket.send({ type: "session.update", session: { type: "realtime", audio: { input } } });
  }

  private answered(status: string, itemIds: string[]): void {
    this.answering = this.stopping = false;
    this.counts.answers += 1;
    for (const id of itemIds) this.captionsOf.end(id);
    if (status === "cancelled") {
      this.counts.interruptions += 1;
      this.cut = itemIds.at(-1) ?? null;
      return this.flush();
    }
    this.sound.end();
    if (status === "failed") this.screen.note(sentence("model_failed", ""));
    if (itemIds.length > 0 && !itemIds.some((id) => this.spoken.has(id))) this.screen.note(TEXT_ONLY);
    this.spoken = new Set();
  }

  private linked(link: CallLink): void {
    const [text, tone] = LINKS[link];
    this.screen.link(text, tone);
  }

  /** A browser hides why an upgrade was refused; the server's HTTP side tells whether a key is wanted or nobody is there. */
  private async gone(why: "refused" | "lost" | "ended", detail: string): Promise<void> {
    if (detail === SHUTDOWN) this.over(SHUTDOWN);
    else this.over(why, detail);
    if (why === "refused" && (await this.find())) this.screen.card(notice(why));
  }

  // ------------------------------------------------------------------------------------------------ sound

  private packet({ samples, level }: MicrophoneTold): void {
    this.counts.packets += 1;
    this.levels.you = Math.max(this.levels.you, level);
    if (!this.live || !this.socket.send({ type: "input_audio_buffer.append", audio: toBase64(samples) })) return;
    this.timing.packet(performance.now(), (samples.length * 1000) / WIRE_RATE, level);
  }

  private flush(): void {
    this.sound.flush();
    this.counts.flushes += 1;
  }

  private played(told: SpeakerTold): void {
    const now = performance.now();
    this.speaker = told;
    this.levels.voice = Math.max(this.levels.voice, told.level);
    if (told.turned) this.sounding = told.turned === "sounds";
    if (told.turned === "sounds") this.timing.sounds(now);
    if (told.flushed) this.timing.stopped(now);
    if (told.flushed && this.cut !== null) this.tellHeard(this.cut, told);
    else if (told.item !== null && this.sounding && now - this.ackedAt > ACK_EVERY_MS) {
      this.ackedAt = now;
      this.socket.send({ type: "playback.ack", item_id: told.item, played_ms: this.heardMs(told) });
    }
  }

  /** After an interruption the conversation keeps what was heard, and the page shows the rest struck out. */
  private tellHeard(item: string, told: SpeakerTold): void {
    this.cut = null;
    const heard = told.item === item ? this.heardMs(told) : 0;
    this.socket.send({ type: "conversation.item.truncate", item_id: item, content_index: 0, audio_end_ms: heard });
    this.socket.send({ type: "conversation.item.retrieve", item_id: item });
  }

  private heardMs(told: SpeakerTold): number {
    return Math.max(0, Math.round(told.ms - this.sound.outputLatencyMs));
  }

  // ------------------------------------------------------------------------------------------------ what is shown

  private get floor(): Floor {
    const you = this.hearing !== null || (this.mode === "push" && this.pressed);
    if (you && this.sounding) return "both";
    return you ? "you" : this.sounding ? "voice" : this.answering ? "thinking" : "nobody";
  }

  private showTalk(): void {
    const active = this.mode === "push" ? this.pressed : !this.muted;
    this.screen.talk(this.mode, active, this.sound.hasMicrophone);
  }

  private async showDevices(): Promise<void> {
    const devices = await this.sound.devices();
    this.screen.devices(devices, this.sound.microphoneId, this.sound.choosesSpeaker);
  }

  private refresh(): void {
    if (!this.live) return;
    this.screen.meters(this.levels.you, this.levels.voice);
    this.levels = { you: this.levels.you * METER_FALL, voice: this.levels.voice * METER_FALL };
    this.screen.floor(this.floor);
    this.screen.captions(this.captionsOf.lines);
    this.screen.figures(this.timing.firstAudioMs, this.timing.bargeInMs, this.speaker?.waitingMs ?? 0, this.speaker?.gaps ?? 0);
  }
}
