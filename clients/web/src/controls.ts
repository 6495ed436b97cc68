// From keyboard, fingers and mouse to held keys. Owns the listeners and the look of the pads; the set itself is HeldKeys.
// Invariant: nothing stays held when the page loses focus, is hidden or loses its session.

import { HeldKeys, keyOf, stickKeys, type WorldKey } from "./held";

export interface ControlsHooks {
  /** The set of held keys has changed, by an event that happened at `at` (performance.now clock). */
  onKeys: (keys: WorldKey[], at: number) => void;
  onShortcut: (name: Shortcut) => void;
}
export type Shortcut = "prompt" | "pause" | "back" | "fork" | "voice";

/** A picture that is dragged on, and the stick that shows the drag. */
export interface Surface { view: HTMLElement; stick: HTMLElement }
const SHORTCUTS: Record<string, Shortcut> = { KeyP: "pause", KeyR: "back", KeyF: "fork", KeyV: "voice" };

const STICK_RADIUS = 30;

export class Controls {
  readonly held = new HeldKeys();
  enabled = false;
  private offered: ReadonlySet<string> | null = null;
  private readonly pads: HTMLButtonElement[];
  private dragOrigin: { id: number; x: number; y: number; stick: HTMLElement } | null = null;

  constructor(surfaces: readonly Surface[], private readonly hooks: ControlsHooks) {
    this.pads = [...document.querySelectorAll<HTMLButtonElement>(".pad button[data-key]")];
    document.addEventListener("keydown", (event) => this.keyDown(event));
    document.addEventListener("keyup", (event) => this.keyUp(event));
    window.addEventListener("blur", () => this.releaseAll());
    document.addEventListener("visibilitychange", () => { if (document.hidden) this.releaseAll(); });
    for (const pad of this.pads) this.listenPad(pad);
    for (const surface of surfaces) this.listenDrag(surface);
  }

  releaseAll(): void {
    this.endDrag();
    this.changed(this.held.releaseAll(), performance.now());
  }

  /** What something else than fingers holds (a voice), in place of what it held. */
  hold(keys: readonly WorldKey[], source: string): void {
    if (this.enabled || keys.length === 0) this.changed(this.held.hold(keys, source), performance.now());
  }

  knows(keys: readonly WorldKey[]): boolean {
    return this.offered === null || keys.every((key) => this.offered!.has(key));
  }

  /** Only the keys that the model knows are offered. */
  offer(keys: ReadonlySet<string> | null): void {
    this.offered = keys;
    for (const pad of this.pads) pad.hidden = keys !== null && !keys.has(pad.dataset.key!);
    for (const group of document.querySelectorAll<HTMLElement>(".pad")) {
      group.hidden = [...group.querySelectorAll<HTMLElement>("button")].every((pad) => pad.hidden);
    }
  }

  private changed(didChange: boolean, at: number): void {
    if (!didChange) return;
    const keys = this.held.keys();
    for (const pad of this.pads) pad.toggleAttribute("data-held", keys.includes(pad.dataset.key as WorldKey));
    this.hooks.onKeys(keys, at);
  }

  private press(key: WorldKey, source: string, at: number): void {
    if (this.enabled) this.changed(this.held.press(key, source), at);
  }

  // ---------------------------------------------------------------- keyboard

  private keyDown(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
    if (takesText(event.target)) {
      if (event.key === "Escape") (event.target as HTMLElement).blur();
      return;
    }
    const key = keyOf(event);
    if (key) {
      event.preventDefault(); // arrow keys would scroll
      if (!event.repeat) this.press(key, event.code || key, event.timeStamp);
    } else if (event.key === "/" && !event.repeat) {
      event.preventDefault();
      this.hooks.onShortcut("prompt");
    } else if (SHORTCUTS[event.code] && !event.repeat) this.hooks.onShortcut(SHORTCUTS[event.code]!);
  }

  private keyUp(event: KeyboardEvent): void {
    const key = keyOf(event); // wherever the focus is by now: a key that goes up is not held
    if (key) this.changed(this.held.release(key, event.code || key), event.timeStamp);
    if (event.key === "Meta") this.releaseAll(); // macOS sends no keyup for letters released while Command is down
  }

  // ---------------------------------------------------------------- pads: fingers, each on its own button, and the mouse

  private listenPad(pad: HTMLButtonElement): void {
    const key = pad.dataset.key as WorldKey;
    const up = (event: PointerEvent) => this.changed(this.held.release(key, `pointer ${event.pointerId}`), event.timeStamp);
    pad.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      event.preventDefault();
      pad.setPointerCapture(event.pointerId);
      this.press(key, `pointer ${event.pointerId}`, event.timeStamp);
    });
    for (const type of ["pointerup", "pointercancel", "lostpointercapture"] as const) pad.addEventListener(type, up);
    pad.addEventListener("contextmenu", (event) => event.preventDefault());
    // Space and Enter hold a focused button, as a finger does.
    pad.addEventListener("keydown", (event) => {
      if (event.key !== " " && event.key !== "Enter") return;
      event.preventDefault();
      if (!event.repeat) this.press(key, `button ${key}`, event.timeStamp);
    });
    const let_go = (at: number) => this.changed(this.held.release(key, `button ${key}`), at);
    pad.addEventListener("keyup", (event) => { if (event.key === " " || event.key === "Enter") let_go(event.timeStamp); });
    pad.addEventListener("blur", (event) => let_go(event.timeStamp));
  }

  // ---------------------------------------------------------------- drag: a stick where the pointer went down

  private listenDrag({ view, stick }: Surface): void {
    view.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || this.dragOrigin || !this.enabled) return;
      (document.activeElement as HTMLElement | null)?.blur(); // a click on the world leaves the text box
      view.setPointerCapture(event.pointerId);
      this.dragOrigin = { id: event.pointerId, x: event.clientX, y: event.clientY, stick };
      const box = view.getBoundingClientRect();
      stick.style.left = `${event.clientX - box.left}px`;
      stick.style.top = `${event.clientY - box.top}px`;
      moveStick(stick, 0, 0);
      stick.hidden = false;
    });
    view.addEventListener("pointermove", (event) => {
      if (event.pointerId !== this.dragOrigin?.id) return;
      const dx = event.clientX - this.dragOrigin.x;
      const dy = event.clientY - this.dragOrigin.y;
      moveStick(stick, dx, dy);
      if (this.enabled) this.changed(this.held.hold(stickKeys(dx, dy), "drag"), event.timeStamp);
    });
    for (const type of ["pointerup", "pointercancel", "lostpointercapture"] as const) {
      view.addEventListener(type, (event) => { if (event.pointerId === this.dragOrigin?.id) this.endDrag(); });
    }
  }

  private endDrag(): void {
    if (this.dragOrigin) this.dragOrigin.stick.hidden = true;
    this.dragOrigin = null;
    this.changed(this.held.hold([], "drag"), performance.now());
  }
}

function moveStick(stick: HTMLElement, dx: number, dy: number): void {
  const reach = Math.min(1, STICK_RADIUS / Math.max(Math.hypot(dx, dy), 1));
  stick.style.setProperty("--x", `${dx * reach}px`);
  stick.style.setProperty("--y", `${dy * reach}px`);
}

function takesText(target: EventTarget | null): boolean {
  if (!(target instanceof HTMLElement)) return false;
  if (target instanceof HTMLInputElement) return target.type !== "file" && target.type !== "button";
  return target instanceof HTMLTextAreaElement || target instanceof HTMLSelectElement || target.isContentEditable;
}
