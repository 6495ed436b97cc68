// What the page says about the session: the link light, the card on the stage, the place, the status strip.

import type { Link } from "./connection";
import { byId, make, setText } from "./dom";
import { ACTION_LABELS, type Action, type Notice } from "./messages";

const STRIP = [
  ["fps", "frames/s", "Frames shown per second", true],
  ["tick", "tick", "Time the model took for the last block", false],
  ["latency", "key to photon", "From a key to the first picture that reflects it, median of the last 40", true],
  ["chunk", "block", "Number of the last block", false],
  ["kv", "KV pages", "Pages of the key-value cache in use", false],
  ["events", "inputs", "Inputs applied of those accepted", false],
  ["bytes", "network", "What the server sends", false],
  ["rtt", "round trip", "Network round trip", false],
] as const;

/** `walk`: all the keys. `turn`: those for turning alone. */
export type Hint = "none" | "walk" | "turn";
export type StripName = (typeof STRIP)[number][0];

export class View {
  private readonly cells = new Map<StripName, HTMLElement>();
  private readonly card = byId("card");
  private cardKey = "";
  private toastTimer = 0;

  constructor(private readonly onAction: (action: Action) => void, onKey: (key: string) => void) {
    for (const [name, label, title, main] of STRIP) {
      const cell = make("dd", { textContent: "–" });
      const group = make("div", { title }, make("dt", { textContent: label }), cell);
      if (main) group.dataset.main = "";
      this.cells.set(name, cell);
      byId("strip").append(group);
    }
    byId<HTMLFormElement>("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      onKey(byId<HTMLInputElement>("key").value.trim());
    });
  }

  strip(name: StripName, text: string): void {
    setText(this.cells.get(name)!, text);
  }

  link(text: string, tone: Notice["tone"]): void {
    setText(byId("link-text"), text);
    byId("link").dataset.tone = tone;
  }

  place(prompt: string): void {
    const place = byId("place");
    place.hidden = prompt === "";
    setText(place, prompt);
    byId("view").setAttribute("aria-label", prompt ? `The generated world: ${prompt}` : "The generated world");
  }

  /** Shows a notice on the stage; focus moves to its first action only when the player must choose. */
  show(notice: Notice, { focus = notice.tone === "bad" } = {}): void {
    const key = JSON.stringify(notice);
    if (key === this.cardKey && !this.card.hidden) return;
    this.cardKey = key;
    this.card.hidden = false;
    setText(byId("card-title"), notice.title);
    setText(byId("card-text"), notice.text);
    setText(byId("card-detail"), notice.detail ?? "");
    setText(byId("toast"), "");
    byId("card-spinner").hidden = notice.tone !== "busy";
    const wantsKey = notice.actions.includes("key");
    byId("key-form").hidden = !wantsKey;
    const actions = notice.actions.filter((action) => action !== "key" && action !== "none");
    const buttons = actions.map((action, i) => {
      const button = make("button", { type: "button", textContent: ACTION_LABELS[action] });
      if (i === 0) button.className = "primary";
      button.addEventListener("click", () => this.onAction(action));
      return button;
    });
    byId("card-actions").replaceChildren(...buttons);
    this.announce(`${notice.title}. ${notice.text}`);
    if (wantsKey) byId("key").focus();
    else if (focus) buttons[0]?.focus({ preventScroll: true });
  }

  /** A line on the stage for some seconds: an answer to what the user did. */
  say(text: string, tone: "bad" | "good" = "good"): void {
    const toast = byId("toast");
    setText(toast, text);
    toast.dataset.tone = tone;
    clearTimeout(this.toastTimer);
    this.toastTimer = window.setTimeout(() => setText(toast, ""), tone === "bad" ? 7_000 : 3_500);
  }

  /** Something has worked: what was refused before it is told no longer. */
  worked(): void {
    const toast = byId("toast");
    if (toast.dataset.tone === "bad") setText(toast, "");
  }

  hint(hint: Hint): void {
    const element = byId("hint");
    element.hidden = hint === "none";
    element.dataset.hint = hint;
  }

  hide(): void {
    if (this.card.contains(document.activeElement)) (document.activeElement as HTMLElement).blur();
    this.card.hidden = true;
    this.cardKey = "";
  }

  announce(text: string): void {
    setText(byId("live"), text);
  }
}

export function linkText(link: Link, resuming: boolean): { text: string; tone: Notice["tone"] } {
  switch (link.state) {
    case "connecting":
      return { text: resuming ? "Reconnecting" : "Connecting", tone: "busy" };
    case "open":
      return { text: "Live", tone: "good" };
    case "waiting":
      return { text: resuming ? "Reconnecting" : "No connection", tone: "busy" };
    case "off":
      return { text: "Not connected", tone: "bad" };
  }
}
