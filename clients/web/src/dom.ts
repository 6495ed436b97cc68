// Small helpers for the page's elements. index.html is part of the program: a missing id is a bug, not a case.

export function byId<T extends HTMLElement = HTMLElement>(id: string): T {
  const element = document.getElementById(id);
  if (!element) throw new Error(`index.html has no #${id}`);
  return element as T;
}

export function make<K extends keyof HTMLElementTagNameMap>(
  tag: K, properties: Partial<HTMLElementTagNameMap[K]> = {}, ...children: (Node | string)[]
): HTMLElementTagNameMap[K] {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** Sets a text only when it differs, so that nothing is laid out or announced again. */
export function setText(element: HTMLElement, text: string): void {
  if (element.textContent !== text) element.textContent = text;
}

/** Details that open below the fold are scrolled into view. */
export function showWhatOpens(details: HTMLDetailsElement): void {
  details.addEventListener("toggle", () => { if (details.open) details.scrollIntoView({ block: "nearest" }); });
}

/** A line to describe a place in. */
export function askingForm(id: string, onPrompt: (prompt: string) => void): void {
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

export async function toggleFullScreen(): Promise<void> {
  if (document.fullscreenElement) await document.exitFullscreen();
  else await document.documentElement.requestFullscreen().catch(() => undefined);
}
