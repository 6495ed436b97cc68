// Which movement keys are held, from any number of sources (a physical key, a finger on a button, a drag).
// A key is held while at least one source holds it. Pure: no DOM, no clock.

export const WORLD_KEYS = ["w", "a", "s", "d", "i", "j", "k", "l"] as const;
export type WorldKey = (typeof WORLD_KEYS)[number];

/** Physical keys (KeyboardEvent.code), so that W A S D is the same cross on every keyboard layout. */
const BY_CODE: Record<string, WorldKey> = {
  KeyW: "w", KeyA: "a", KeyS: "s", KeyD: "d", KeyI: "i", KeyJ: "j", KeyK: "k", KeyL: "l",
  ArrowLeft: "j", ArrowRight: "l", ArrowUp: "i", ArrowDown: "k",
};

export function keyOf(event: { code: string; key: string }): WorldKey | null {
  const byCode = BY_CODE[event.code];
  if (byCode || event.code) return byCode ?? null;
  const letter = event.key.toLowerCase(); // virtual keyboards send no code
  return (WORLD_KEYS as readonly string[]).includes(letter) ? (letter as WorldKey) : null;
}

/** The keys that a control's JSON schema names in its enum; null (all) when it names none. */
export function keysOf(schema: unknown): ReadonlySet<string> | null {
  const match = /"enum":(\[[^\]]*\])/.exec(JSON.stringify(schema ?? null));
  return match ? new Set(JSON.parse(match[1]!) as string[]) : null;
}

export class HeldKeys {
  private readonly sources = new Map<WorldKey, Set<string>>();

  /** Each of the three says whether the set of held keys has changed. */
  press(key: WorldKey, source: string): boolean {
    const holders = this.sources.get(key);
    if (holders) {
      holders.add(source);
      return false;
    }
    this.sources.set(key, new Set([source]));
    return true;
  }

  release(key: WorldKey, source: string): boolean {
    const holders = this.sources.get(key);
    if (!holders?.delete(source) || holders.size > 0) return false;
    this.sources.delete(key);
    return true;
  }

  releaseAll(): boolean {
    const changed = this.sources.size > 0;
    this.sources.clear();
    return changed;
  }

  /** Replaces everything that one source holds. */
  hold(keys: readonly WorldKey[], source: string): boolean {
    let changed = false;
    for (const key of [...this.sources.keys()]) {
      if (!keys.includes(key)) changed = this.release(key, source) || changed;
    }
    for (const key of keys) changed = this.press(key, source) || changed;
    return changed;
  }

  /** In a fixed order, so that equal sets give equal messages. */
  keys(): WorldKey[] {
    return WORLD_KEYS.filter((key) => this.sources.has(key));
  }
}

/** The keys that a drag of (dx, dy) pixels from its origin holds: a stick with a dead zone. */
export function stickKeys(dx: number, dy: number, deadZone = 26): WorldKey[] {
  const keys: WorldKey[] = [];
  if (Math.abs(dx) > deadZone && Math.abs(dx) > Math.abs(dy) * 0.5) keys.push(dx < 0 ? "j" : "l");
  if (Math.abs(dy) > deadZone && Math.abs(dy) > Math.abs(dx) * 0.9) keys.push(dy < 0 ? "i" : "k");
  return keys;
}
