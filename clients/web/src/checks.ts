// The strict door for text: what JSON.parse lets through and the protocol refuses, and checks for fields. Pure.
// Invariant: a value that passed `record` has exactly the declared fields, with the declared types and ranges.

export const MAX_INTEGER = 2 ** 53; // ids and counters stay exact in a double
const MAX_DEPTH = 32;

export class ProtocolError extends Error {
  constructor(message: string, readonly path = "$", readonly code = "bad_message") {
    super(`${path}: ${message}`);
    this.name = "ProtocolError";
  }
}

export interface Strict {
  value: unknown;
  /** Paths of numbers written as 1.0 or 1e3: fine as numbers, not as integers. */
  reals: ReadonlySet<string>;
}

interface Level { path: string; keys: Set<string> | null; key: string; index: number; wantsKey: boolean }

const TOKEN = /"(?:[^"\\]|\\.)*"|[{}[\],]|-?\d[\d.eE+-]*/g;
const SURROGATE = /\p{Surrogate}/u; // with the u flag only a lone one matches

export function childPath(path: string, key: string): string {
  return /^[A-Za-z_]\w{0,63}$/.test(key) ? `${path}.${key}` : `${path}[${JSON.stringify(key.slice(0, 64))}]`;
}

/** JSON with the protocol's extra rules: no key twice, no deep nesting, no lone surrogates, exact integers, finite numbers. */
export function parseStrict(text: string): Strict {
  if (SURROGATE.test(text)) throw new ProtocolError("not valid Unicode");
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch {
    throw new ProtocolError("not JSON");
  }
  const reals = new Set<string>();
  const stack: Level[] = [];
  const here = (): string => {
    const top = stack.at(-1);
    return top === undefined ? "$" : top.keys === null ? `${top.path}[${top.index}]` : childPath(top.path, top.key);
  };
  for (const [token] of text.matchAll(TOKEN)) {
    const top = stack.at(-1);
    if (token === "{" || token === "[") {
      if (stack.length >= MAX_DEPTH) throw new ProtocolError(`nested deeper than ${MAX_DEPTH} levels`);
      stack.push({ path: here(), keys: token === "{" ? new Set() : null, key: "", index: 0, wantsKey: token === "{" });
    } else if (token === "}" || token === "]") stack.pop();
    else if (token === ",") {
      top!.index += 1;
      top!.wantsKey = top!.keys !== null;
    } else if (token.startsWith('"')) {
      const string = JSON.parse(token) as string;
      if (SURROGATE.test(string)) throw new ProtocolError("a lone surrogate in a string");
      if (!top?.wantsKey) continue;
      if (top.keys!.has(string)) throw new ProtocolError("a key comes twice", childPath(top.path, string));
      top.keys!.add(string);
      top.key = string;
      top.wantsKey = false;
    } else checkNumber(token, here(), reals);
  }
  return { value, reals };
}

function checkNumber(literal: string, path: string, reals: Set<string>): void {
  if (/[.eE]/.test(literal)) {
    const value = Number(literal);
    if (!Number.isFinite(value)) throw new ProtocolError("not a finite number", path);
    if (Number.isInteger(value)) reals.add(path);
  } else if (literal.length > 15) {
    const value = literal.length > 20 ? null : BigInt(literal);
    const limit = BigInt(MAX_INTEGER);
    if (value === null || value > limit || value < -limit) throw new ProtocolError("an integer beyond 2^53", path);
  }
}

// ---------------------------------------------------------------------------------------------------- fields

export type Check = (value: unknown, path: string, reals: ReadonlySet<string>) => unknown;
export type Table = Record<string, Check>;

function refuse(path: string, wanted: string): never {
  throw new ProtocolError(`${wanted} expected`, path);
}

export const any: Check = (v) => v;
export const bool: Check = (v, p) => (typeof v === "boolean" ? v : refuse(p, "boolean"));
export const object: Check = (v, p) => (typeof v === "object" && v !== null && !Array.isArray(v) ? v : refuse(p, "object"));
export const num = (low = -Infinity, high = Infinity, { above = false } = {}): Check => (v, p) =>
  typeof v === "number" && Number.isFinite(v) && v >= low && v <= high && !(above && v === low) ? v : refuse(p, "number in range");

export const int = (low = 0, high = MAX_INTEGER): Check => (v, p, reals) =>
  typeof v === "number" && Number.isInteger(v) && v >= low && v <= high && !reals.has(p) ? v : refuse(p, "integer in range");

/** Lengths are code points, as the server counts them. */
export const str = (min = 0, max = Infinity, pattern?: RegExp): Check => (v, p) => {
  if (typeof v !== "string") refuse(p, "string");
  const length = v.length <= max && v.length >= 2 * min ? v.length : [...v].length;
  return length >= min && length <= max && (!pattern || pattern.test(v)) ? v : refuse(p, "string of the right shape");
};

export const oneOf = (values: readonly string[], code = "bad_message"): Check => (v, p) => {
  if (typeof v !== "string") refuse(p, "string");
  if (!values.includes(v)) throw new ProtocolError(`${values.join(" | ")} expected`, p, code);
  return v;
};

export const nullable = (check: Check): Check => (v, p, reals) => (v === null ? null : check(v, p, reals));

export const list = (check: Check, min = 0, max = Infinity): Check => (v, p, reals) => {
  if (!Array.isArray(v) || v.length < min || v.length > max) refuse(p, "list of the right length");
  return v.map((item, i) => check(item, `${p}[${i}]`, reals));
};

export const increasing = (check: Check): Check => (v, p, reals) => {
  const ids = check(v, p, reals) as number[];
  return ids.every((id, i) => i === 0 || id > ids[i - 1]!) ? ids : refuse(p, "strictly increasing ids");
};

/** Optional fields have a "?" at the end of their name; absent and null mean the same for them. */
export const record = (table: Table, skip: readonly string[] = []): Check => {
  const names = new Map(Object.entries(table).map(([key, check]) => [key.replace(/\?$/, ""), { check, optional: key.endsWith("?") }]));
  return (v, p, reals) => {
    const source = object(v, p, reals) as Record<string, unknown>;
    const result: Record<string, unknown> = {};
    for (const key of Object.keys(source)) {
      if (!names.has(key) && !skip.includes(key)) throw new ProtocolError("unknown field", childPath(p, key));
    }
    for (const [name, { check, optional }] of names) {
      const value = Object.hasOwn(source, name) ? source[name] : undefined;
      if (optional && (value === undefined || value === null)) continue;
      if (value === undefined) throw new ProtocolError("missing", childPath(p, name));
      result[name] = check(value, childPath(p, name), reals);
    }
    return result;
  };
};
