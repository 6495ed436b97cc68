// The button that lets somebody steer by voice, and what was said, on the stage. Shown where the server has a voice that calls tools;
// the rest of it (voice/) is loaded when it is pressed.

import type { ModelInfo } from "./api";
import { byId, make } from "./dom";
import type { Step } from "./steering";
import type { Line } from "./talk/captions";
import type { VoiceControl } from "./voice/control";

export interface VoiceButtonHooks {
  onStep: (step: Step) => string;
  /** Nothing that was said is to act any more. */
  onEnd: () => void;
  onNote: (text: string, tone: "good" | "bad") => void;
}
type State = "off" | "opening" | "live";

const NAMES = { user: "You", voice: "Voice" };
const SHOWN_LINES = 2;
const TITLES = { off: "Steer by voice (V)", opening: "Opening the microphone", live: "Stop listening (V)" };
const SAY = "Say “walk forward”, “turn left”, “stop” or “make it snow”.";

export class VoiceButton {
  private readonly button = byId<HTMLButtonElement>("speak");
  private readonly heard = byId("heard");
  private control: VoiceControl | null = null;
  private model: ModelInfo | null = null;
  private state: State = "off";

  constructor(private readonly url: string, private readonly hooks: VoiceButtonHooks) {
    this.button.addEventListener("click", () => this.toggle());
    window.addEventListener("pagehide", () => this.control?.end());
  }

  offer(models: readonly ModelInfo[]): void {
    this.model = models.find(({ voice }) => voice?.takes_tools) ?? null;
    this.button.hidden = this.model === null;
  }

  toggle(): void {
    if (this.control) this.control.end();
    else if (this.state === "off" && this.model) void this.begin(this.model);
  }

  stats() {
    return { state: this.state, lines: [...this.heard.children].map((line) => line.textContent) };
  }

  private async begin({ name, voice }: ModelInfo): Promise<void> {
    this.show("opening");
    let loaded: typeof import("./voice/control");
    try {
      loaded = await import("./voice/control");
    } catch {
      this.show("off");
      return this.hooks.onNote("The voice control did not load.", "bad");
    }
    this.control = new loaded.VoiceControl(this.url, voice!, name, {
      onStep: this.hooks.onStep,
      onCaptions: (lines) => this.captions(lines),
      onLevel: (level) => this.button.style.setProperty("--level", level.toFixed(3)),
      onLive: () => {
        this.show("live");
        this.hooks.onNote(SAY, "good");
      },
      onEnd: (why) => this.ended(why),
      onNote: (text) => this.hooks.onNote(text, "bad"),
    });
    await this.control.begin();
  }

  private ended(why: string | null): void {
    this.control = null;
    this.show("off");
    this.captions([]);
    this.hooks.onEnd();
    if (why !== null) this.hooks.onNote(why, "bad");
  }

  private show(state: State): void {
    this.state = state;
    this.button.dataset.state = state;
    this.button.setAttribute("aria-pressed", String(state === "live"));
    this.button.setAttribute("aria-busy", String(state === "opening"));
    this.button.title = TITLES[state];
    if (state !== "live") this.button.style.removeProperty("--level");
  }

  private captions(lines: readonly Line[]): void {
    const shown = lines.filter(({ text }) => text !== "").slice(-SHOWN_LINES);
    this.heard.replaceChildren(...shown.map(({ who, text }) => make("p", {}, make("b", { textContent: NAMES[who] }), ` ${text}`)));
  }
}
