// Going back, and walking on in two ways: which of the two walks gets the keys, and which of them is kept. Owns the past's pictures and
// the branch; what becomes of the first walk is the app's.

import { apiKey } from "./api";
import { Branch } from "./branch";
import { askingForm, byId } from "./dom";
import type { WorldKey } from "./held";
import type { WorldMachine } from "./machine";
import { Past } from "./past";
import type { WorldPicture } from "./picture";
import type { ClientMessage, Forked, Rewound } from "./protocol";

const BACK_S = 1; // how far the button goes back

export interface TwoHooks {
  machine: () => WorldMachine;
  live: () => boolean;
  send: (message: ClientMessage) => boolean;
  /** Sends what is held to both again. */
  sendKeys: () => void;
  say: (text: string) => void;
  log: (text: string) => void;
  /** The branch's machine takes the place of the first walk's. */
  goOnWith: (machine: WorldMachine, branch: WorldPicture) => void;
}

export class TwoWalks {
  readonly branch: Branch;
  readonly past = new Past((nextChunk) => {
    this.asked = 0;
    this.rewind(nextChunk);
  });
  private asked = 0; // blocks that the button asked for last

  constructor(url: string, private readonly picture: WorldPicture, private readonly hooks: TwoHooks) {
    this.branch = new Branch(url, () => apiKey.get(), hooks.log);
    byId("back").addEventListener("click", () => this.goBack());
    byId("fork").addEventListener("click", () => this.fork());
    byId("keep").addEventListener("click", () => this.keepFirst());
    byId("branch-keep").addEventListener("click", () => this.keepBranch());
    for (const choice of keyChoices()) choice.addEventListener("change", () => this.chooseKeys());
    askingForm("branch-form", (prompt) => this.branch.ask(prompt));
  }

  stats() {
    if (!this.branch.active) return null;
    const { machine, shownFrames } = this.branch;
    return {
      ...machine.statistics(), sessionId: machine.session?.session_id ?? null, prompt: machine.prompt, shownFrames,
      chunkIndex: machine.chunkIndex,
    };
  }

  /** Which of the held keys the first walk gets; the branch gets its own at once. */
  share(track: string, held: WorldKey[], tMs: number): WorldKey[] {
    if (this.branch.active) this.branch.hold(track, this.keysTo === "first" ? [] : held, tMs);
    return this.keysTo === "branch" ? [] : held;
  }

  goBack(): void {
    const { fps, frames_per_block } = this.hooks.machine().session ?? { fps: 1, frames_per_block: 1 };
    this.goBackBy(Math.max(1, Math.round((fps * BACK_S) / frames_per_block)));
  }

  /** The server has forgotten the moment that was asked for: true when a nearer one is asked for instead. */
  notRetained(): boolean {
    if (this.asked <= 1) return false;
    this.goBackBy(Math.floor(this.asked / 2)); // the server went on, and forgot, while we asked
    return true;
  }

  /** The world went back; shows the picture of that moment. */
  wentBack(rewound: Rewound): void {
    this.asked = 0;
    const picture = this.past.backTo(rewound.chunk_index);
    if (picture) this.picture.draw(picture);
  }

  fork(): void {
    if (this.canBranch) this.hooks.send(this.hooks.machine().fork());
  }

  split(forked: Forked): void {
    if (this.branch.active) return;
    const machine = this.hooks.machine();
    this.branch.begin(machine.branch(forked), machine.format, this.picture.world);
    this.show(true);
    this.hooks.sendKeys();
    byId<HTMLInputElement>("branch-prompt").focus({ preventScroll: true });
  }

  /** Only the first walk goes on. */
  backToOne(): void {
    this.branch.end();
    this.show(false);
  }

  refresh(): void {
    byId("fork").hidden = byId("back").hidden = this.hooks.machine().oldestRewind === null || this.branch.active;
    byId("past").toggleAttribute("inert", this.branch.active);
  }

  private get canBranch(): boolean {
    const machine = this.hooks.machine();
    return (this.hooks.live() || machine.phase === "failed") && machine.oldestRewind !== null && !this.branch.active;
  }

  private goBackBy(blocks: number): void {
    const moment = this.past.before(blocks);
    this.asked = blocks;
    if (moment !== null) this.rewind(moment);
    else if (this.canBranch) this.hooks.say("There is nothing to go back to yet.");
  }

  private rewind(nextChunk: number): void {
    if (this.canBranch) this.hooks.send(this.hooks.machine().rewind(nextChunk));
  }

  private keepFirst(): void {
    this.backToOne();
    this.hooks.say("The other branch is closed.");
  }

  /** The branch becomes the walk: its session moves to the page's first connection. */
  private keepBranch(): void {
    const machine = this.branch.release();
    machine.skipToReceived(); // frames that waited in the branch's player
    this.hooks.goOnWith(machine, this.branch.picture);
    this.past.clear();
    this.show(false);
  }

  private show(two: boolean): void {
    document.body.toggleAttribute("data-two", two);
    for (const id of ["branch-pane", "keys-to", "first-foot"]) byId(id).hidden = !two;
    byId<HTMLInputElement>("keys-both").checked = true;
    this.chooseKeys();
    this.refresh();
  }

  private get keysTo(): string {
    return keyChoices().find(({ checked }) => checked)!.value;
  }

  private chooseKeys(): void {
    byId("world").toggleAttribute("data-keys", this.keysTo !== "branch");
    byId("branch-world").toggleAttribute("data-keys", this.keysTo !== "first");
    if (this.branch.active) this.hooks.sendKeys(); // who loses the keys lets them go
  }
}

function keyChoices(): HTMLInputElement[] {
  return [...document.querySelectorAll<HTMLInputElement>('input[name="keys-to"]')];
}
