// From what a voice asks for to held keys and places: the tools that the page offers, and what a call of one means. Pure; timers are
// an argument. The tools are those that the embedded voice's rules call (realtime_omni/models/voice/skills/table.py).

import type { WorldKey } from "./held";

/** Walking goes on until something else is said, a turn for its time. `slot`: what a later one of its kind replaces. */
export type Step =
  | { kind: "hold"; slot: "walk" | "turn"; keys: WorldKey[]; ms: number }
  | { kind: "halt" }
  | { kind: "place"; prompt: string };

const A_LITTLE = "a little";
const TURN_MS = 1_200;
const AROUND_MS = 3_600;
const LITTLE_MS = 450;
const FEW_STEPS_MS = 1_200;
const MOST_WALK_MS = 30_000; // who says nothing for so long has left
const MOST_PROMPT_CHARS = 400;
const WALK: Record<string, WorldKey> = { forward: "w", back: "s", left: "a", right: "d" };
const TURN: Record<string, WorldKey> = { left: "j", right: "l", up: "i", down: "k", around: "l" };

function steering(name: string, description: string, directions: Record<string, WorldKey>) {
  const direction = { type: "string", enum: Object.keys(directions) };
  const amount = { type: "string", enum: [A_LITTLE] };
  return { type: "function", name, description, parameters: { type: "object", properties: { direction, amount }, required: ["direction"] } };
}

export const TOOLS = [
  steering("move", "Walk in the world.", WALK),
  steering("turn", "Look in another direction.", TURN),
  { type: "function", name: "halt", description: "Stand still.", parameters: { type: "object", properties: {} } },
  {
    type: "function", name: "set_scene", description: "Change the world's weather, time of day or place.",
    parameters: { type: "object", properties: { scene: { type: "string" } }, required: ["scene"] },
  },
];

/** What a call of a tool means; null for one that the page did not offer, or whose arguments it cannot use. */
export function stepOf(name: string, args: string): Step | null {
  const { direction, amount, scene } = fieldsOf(args);
  const little = amount === A_LITTLE;
  const [walk, turn] = [keyOf(WALK, direction), keyOf(TURN, direction)];
  if (name === "halt") return { kind: "halt" };
  if (name === "move" && walk) return { kind: "hold", slot: "walk", keys: [walk], ms: little ? FEW_STEPS_MS : MOST_WALK_MS };
  if (name === "turn" && turn) return { kind: "hold", slot: "turn", keys: [turn], ms: little ? LITTLE_MS : direction === "around" ? AROUND_MS : TURN_MS };
  if (name !== "set_scene" || typeof scene !== "string" || scene.trim() === "") return null;
  return { kind: "place", prompt: scene.trim().slice(0, MOST_PROMPT_CHARS) };
}

function keyOf(directions: Record<string, WorldKey>, direction: unknown): WorldKey | undefined {
  return typeof direction === "string" && Object.hasOwn(directions, direction) ? directions[direction] : undefined;
}

function fieldsOf(args: string): Record<string, unknown> {
  try {
    const value: unknown = JSON.parse(args);
    return typeof value === "object" && value !== null ? (value as Record<string, unknown>) : {};
  } catch {
    return {};
  }
}

export interface SteeringHooks {
  hold: (keys: readonly WorldKey[], source: string) => void;
  after: (run: () => void, ms: number) => number;
  cancel: (timer: number) => void;
}

/** What a voice holds, and until when. */
export class Steering {
  private readonly timers = new Map<string, number>();

  constructor(private readonly hooks: SteeringHooks) {}

  take(step: Step & { kind: "hold" | "halt" }): void {
    if (step.kind === "halt") return this.halt();
    const source = `voice ${step.slot}`;
    this.stop(source);
    this.hooks.hold(step.keys, source);
    this.timers.set(source, this.hooks.after(() => this.stop(source), step.ms));
  }

  halt(): void {
    for (const source of [...this.timers.keys()]) this.stop(source);
  }

  private stop(source: string): void {
    const timer = this.timers.get(source);
    if (timer === undefined) return;
    this.hooks.cancel(timer);
    this.timers.delete(source);
    this.hooks.hold([], source);
  }
}
