// What both said, in order. Pure. A line of the user's stands where the speech began, though its words come later.

import type { Speaker } from "./events";

const MOST_LINES = 200;

export interface Line {
  id: string; who: Speaker; text: string;
  /** What the voice had written and the user did not hear, after an interruption. */
  unheard: string;
  done: boolean;
}

export class Captions {
  lines: Line[] = [];

  begin(id: string, who: Speaker): Line {
    const known = this.lines.find((line) => line.id === id);
    if (known) return known;
    const line: Line = { id, who, text: "", unheard: "", done: false };
    this.lines = [...this.lines.slice(1 - MOST_LINES), line];
    return line;
  }

  words(id: string, who: Speaker, text: string): void {
    this.begin(id, who).text += text;
  }

  /** The user's whole text; without any it was no speech, and the line goes. */
  userSaid(id: string, text: string): void {
    Object.assign(this.begin(id, "user"), { text: text.trim(), done: true });
    if (text.trim() === "") this.lines = this.lines.filter((line) => line.id !== id);
  }

  /** The voice was interrupted, and so much of its text was heard. */
  heard(id: string, text: string): void {
    const line = this.begin(id, "voice");
    const rest = line.text.startsWith(text) ? line.text.slice(text.length) : "";
    Object.assign(line, { text, unheard: rest, done: true });
  }

  end(id: string): void {
    const line = this.lines.find((known) => known.id === id);
    if (line) line.done = true;
  }
}
