// The elements of talk.html: what they show and what the user does with them. Knows no sound and no server.

import { byId, make, setText, showWhatOpens } from "../dom";
import type { Line } from "./captions";
import type { Notice } from "./messages";
import { QUESTIONS, type Question } from "./questions";

export type Floor = "nobody" | "you" | "thinking" | "voice" | "both";
export type Mode = "free" | "push";
export type Tone = "idle" | "busy" | "good" | "bad";
export type Phase = "idle" | "opening" | "live";

export interface Wishes {
  onBegin: (microphone: boolean) => void;
  onMode: (mode: Mode) => void;
  /** The big button or its key goes down, or up. */
  onTalk: (down: boolean) => void;
  onStop: () => void;
  onEnd: () => void;
  onQuestion: (question: Question) => void;
  onText: (text: string) => void;
  onMicrophone: (id: string) => void;
  onSpeaker: (id: string) => void;
  onKey: (key: string) => void;
}

const FLOOR: Record<Floor, string> = { nobody: "Say something", you: "You are speaking", thinking: "It thinks", voice: "It speaks", both: "Both speak" };
export const ANY_DEVICE = "any";
const NOTE_MS = 6_000;
const QUIETEST_DB = -55; // where a meter begins

export class Screen {
  private readonly rows = new Map<string, HTMLLIElement>();
  private noteTimer = 0;
  private following = true; // the newest line is in sight, and stays there

  constructor(private readonly wishes: Wishes) {
    byId("begin").addEventListener("click", () => wishes.onBegin(true));
    byId("begin-without").addEventListener("click", () => wishes.onBegin(false));
    byId("stop").addEventListener("click", () => wishes.onStop());
    byId("end").addEventListener("click", () => wishes.onEnd());
    for (const radio of modes()) radio.addEventListener("change", () => wishes.onMode(radio.value as Mode));
    this.talkButton();
    this.keyboard();
    this.forms();
    byId<HTMLSelectElement>("microphone").addEventListener("change", ({ target }) => wishes.onMicrophone((target as HTMLSelectElement).value));
    byId<HTMLSelectElement>("speaker").addEventListener("change", ({ target }) => wishes.onSpeaker((target as HTMLSelectElement).value));
    for (const question of QUESTIONS) {
      const button = make("button", { type: "button", textContent: question.text });
      button.dataset.question = question.name;
      button.addEventListener("click", () => {
        scrollTo(0, 0); // on a phone the questions stand below the captions
        wishes.onQuestion(question);
      });
      byId("questions").append(make("li", {}, button));
    }
    showWhatOpens(byId<HTMLDetailsElement>("about"));
    const list = byId("captions");
    list.addEventListener("scroll", () => { this.following = list.scrollHeight - list.scrollTop - list.clientHeight < 40; });
    new ResizeObserver(() => this.follow()).observe(list); // a phone was turned
    this.phase("idle");
  }

  phase(phase: Phase): void {
    document.body.dataset.phase = phase;
    const live = phase === "live";
    for (const id of ["talk", "stop", "end", "text", "send"]) byId<HTMLButtonElement>(id).disabled = !live;
    for (const radio of modes()) radio.disabled = !live;
    for (const select of ["microphone", "speaker"]) byId<HTMLSelectElement>(select).disabled = !live;
    byId("card").hidden = live;
    byId("card-spinner").hidden = phase !== "opening";
    byId("card-actions").hidden = phase === "opening";
    if (phase === "opening") this.card({ title: "One moment", text: "The call is being opened." });
    this.floor("nobody");
    this.meters(0, 0);
  }

  card(notice: Notice, detail = ""): void {
    setText(byId("card-title"), notice.title);
    setText(byId("card-text"), notice.text);
    setText(byId("card-detail"), detail);
    byId("key-form").hidden = true;
  }

  askKey(text: string): void {
    this.card({ title: "A key, please", text });
    byId("key-form").hidden = false;
    byId("card-actions").hidden = true;
    byId("key").focus();
  }

  model(name: string, typing: boolean): void {
    setText(byId("model-name"), name);
    byId("type-section").hidden = !typing;
  }

  link(text: string, tone: Tone): void {
    setText(byId("link-text"), text);
    byId("link").dataset.tone = tone;
  }

  floor(floor: Floor): void {
    byId("floor").dataset.floor = floor;
    setText(byId("floor-text"), document.body.dataset.phase === "live" ? FLOOR[floor] : "");
  }

  /** Root mean squares, 0 to 1. */
  meters(you: number, voice: number): void {
    byId("you").style.setProperty("--level", meter(you));
    byId("voice").style.setProperty("--level", meter(voice));
  }

  talk(mode: Mode, active: boolean, microphone: boolean): void {
    const label = mode === "push" ? (active ? "Let go to send" : "Hold to talk") : !microphone ? "Use the microphone" : active ? "Mute" : "Unmute";
    const button = byId<HTMLButtonElement>("talk");
    setText(byId("talk-label"), label);
    button.title = mode === "push" ? "Hold to talk (Space)" : `${label} (M)`;
    button.toggleAttribute("data-on", mode === "push" && active);
    button.toggleAttribute("data-off", mode === "free" && microphone && !active);
    if (mode === "free" && microphone) button.setAttribute("aria-pressed", String(!active));
    else button.removeAttribute("aria-pressed");
    for (const radio of modes()) radio.checked = radio.value === mode;
  }

  captions(lines: readonly Line[]): void {
    const list = byId("captions");
    for (const [id, row] of this.rows) if (!lines.some((line) => line.id === id)) { row.remove(); this.rows.delete(id); }
    for (const line of lines) this.row(list, line);
    this.follow();
  }

  private follow(): void {
    const list = byId("captions");
    if (this.following) list.scrollTop = list.scrollHeight;
  }

  note(text: string): void {
    setText(byId("note"), text);
    clearTimeout(this.noteTimer);
    this.noteTimer = window.setTimeout(() => setText(byId("note"), ""), NOTE_MS);
  }

  figures(firstAudioMs: number | null, bargeInMs: number | null, waitingMs: number, gaps: number): void {
    setText(byId("first-audio"), milliseconds(firstAudioMs));
    setText(byId("barge-in"), milliseconds(bargeInMs));
    setText(byId("waiting"), milliseconds(waitingMs));
    setText(byId("gaps"), String(gaps));
  }

  devices(devices: readonly MediaDeviceInfo[], microphone: string | null, choosesSpeaker: boolean): void {
    const inputs = devices.filter(({ kind }) => kind === "audioinput");
    choose("microphone", [["", "None"], ...inputs.map(named)], microphone ?? "");
    byId("speaker-row").hidden = !choosesSpeaker;
    const outputs = devices.filter(({ kind, deviceId }) => kind === "audiooutput" && deviceId !== "default");
    choose("speaker", [["", "Default"], ...outputs.map(named)], byId<HTMLSelectElement>("speaker").value);
  }

  private row(list: HTMLElement, line: Line): void {
    let row = this.rows.get(line.id);
    if (!row) {
      row = make("li", {}, make("b", { textContent: line.who === "user" ? "You" : "Voice" }), make("p", {}, make("span"), make("s")));
      row.dataset.who = line.who;
      this.rows.set(line.id, row);
      list.append(row);
    }
    row.toggleAttribute("data-done", line.done);
    setText(row.querySelector("span")!, line.text || (line.done ? "" : "…"));
    setText(row.querySelector("s")!, line.unheard);
  }

  /** Held by a finger, the mouse or a key: what began on the button ends wherever it is let go. */
  private talkButton(): void {
    const button = byId<HTMLButtonElement>("talk");
    button.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      button.setPointerCapture(event.pointerId);
      this.wishes.onTalk(true);
    });
    for (const name of ["pointerup", "pointercancel"] as const) button.addEventListener(name, () => this.wishes.onTalk(false));
    button.addEventListener("contextmenu", (event) => event.preventDefault()); // a long press on a phone
  }

  private keyboard(): void {
    let held = false;
    window.addEventListener("keydown", (event) => {
      if (document.body.dataset.phase !== "live" || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "Escape") return this.wishes.onStop();
      if (isTyping(event.target)) return;
      const push = chosenMode() === "push";
      const onButton = event.target === byId("talk") && (event.key === "Enter" || event.key === " ");
      if (!(onButton || (push ? event.key === " " && !isControl(event.target) : event.key.toLowerCase() === "m"))) return;
      event.preventDefault();
      if (event.repeat || held) return;
      held = true;
      this.wishes.onTalk(true);
    });
    const release = () => {
      if (held) this.wishes.onTalk(false);
      held = false;
    };
    window.addEventListener("keyup", (event) => {
      if (held && event.key === " ") event.preventDefault();
      if ([" ", "Enter", "m", "M"].includes(event.key)) release();
    });
    window.addEventListener("blur", release);
  }

  private forms(): void {
    byId<HTMLFormElement>("type-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const input = byId<HTMLInputElement>("text");
      const text = input.value.trim();
      input.value = "";
      if (text !== "") this.wishes.onText(text);
    });
    byId<HTMLFormElement>("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.wishes.onKey(byId<HTMLInputElement>("key").value.trim());
    });
  }
}

function modes(): HTMLInputElement[] {
  return [...document.querySelectorAll<HTMLInputElement>('input[name="mode"]')];
}

function chosenMode(): string {
  return modes().find(({ checked }) => checked)!.value;
}

function isTyping(target: EventTarget | null): boolean {
  return target instanceof HTMLSelectElement || (target instanceof HTMLInputElement && target.type !== "radio");
}

/** Something that Space is for already. */
function isControl(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && target.closest("button, summary, input, a") !== null;
}

function choose(id: string, options: [string, string][], chosen: string): void {
  const select = byId<HTMLSelectElement>(id);
  select.replaceChildren(...options.map(([value, text]) => make("option", { value, textContent: text, selected: value === chosen })));
}

/** Before the user has allowed a microphone, browsers give devices neither names nor ids. */
function named({ deviceId, label, kind }: MediaDeviceInfo, i: number): [string, string] {
  return [deviceId || ANY_DEVICE, label || `${kind === "audioinput" ? "Microphone" : "Speaker"} ${i + 1}`];
}

function meter(level: number): string {
  const db = 20 * Math.log10(Math.max(level, 1e-6));
  return Math.max(0, Math.min(1, 1 - db / QUIETEST_DB)).toFixed(3);
}

function milliseconds(ms: number | null): string {
  return ms === null ? "–" : `${Math.round(ms)} ms`;
}
