// The HTTP side: which models there are, their start pictures, and whether a key is wanted. Pictures are fetched (not put into
// <img>) because they may need the key, and drawn on canvases because the content security policy allows nothing but 'self'.

export interface StartPicture { name: string; url: string }
export interface ModelInfo {
  name: string; prompts: string[]; starts: StartPicture[];
  /** Whether a session may begin from a picture of the user's. */
  takesImage: boolean;
  /** What a voice can do; null for a model that makes no speech. */
  voice: Voice | null;
  makesWorlds: boolean;
  /** A policy that only tells robots how to move, and makes no pictures. */
  onlyRobots: boolean;
}
export interface Voice { turn_modes: string[]; takes_text: boolean; takes_tools: boolean }

const ANSWER_TIMEOUT_MS = 5_000;
const KEY_ITEM = "realtime_omni.key";

export class KeyWanted extends Error {}
export class Refused extends Error {}

export const apiKey = {
  get: (): string | null => sessionStorage.getItem(KEY_ITEM),
  set: (key: string): void => sessionStorage.setItem(KEY_ITEM, key),
};

async function get(url: string): Promise<Response> {
  const key = apiKey.get();
  const response = await fetch(url, key ? { headers: { Authorization: `Bearer ${key}` } } : {});
  if (response.status === 401) throw new KeyWanted();
  if (response.status === 403) throw new Refused();
  if (!response.ok) throw new Error(`HTTP ${response.status}`);
  return response;
}

export async function fetchModels(base: string): Promise<ModelInfo[]> {
  const body = (await (await get(`${base}/v1/models`)).json()) as Record<string, unknown>;
  const entries = Array.isArray(body) ? body : ((body.models ?? body.data ?? []) as unknown[]);
  return entries.map((entry) => modelOf(entry, base)).filter((model) => model !== null);
}

/** Whether the server is there and well. */
export async function serverAnswers(base: string): Promise<boolean> {
  try {
    return (await fetch(`${base}/healthz`, { cache: "no-store", signal: AbortSignal.timeout(ANSWER_TIMEOUT_MS) })).ok;
  } catch {
    return false;
  }
}

export async function fetchPicture(url: string): Promise<ImageBitmap> {
  return createImageBitmap(await (await get(url)).blob());
}

function modelOf(entry: unknown, base: string): ModelInfo | null {
  if (typeof entry === "string") return { name: entry, prompts: [], starts: [], takesImage: true, voice: null, makesWorlds: true, onlyRobots: false };
  if (typeof entry !== "object" || entry === null) return null;
  const fields = entry as Record<string, unknown>;
  const name = fields.name ?? fields.id;
  if (typeof name !== "string") return null;
  const starts = (Array.isArray(fields.starts) ? fields.starts : []).flatMap((start: unknown): StartPicture[] => {
    if (typeof start === "string") return [startOf(name, start, base)];
    const { name: startName, url } = (start ?? {}) as Record<string, unknown>;
    if (typeof startName !== "string") return [];
    return [typeof url === "string" ? { name: startName, url: base + new URL(url, location.origin).pathname } : startOf(name, startName, base)];
  });
  const prompts = (Array.isArray(fields.prompts) ? fields.prompts : []).filter((prompt) => typeof prompt === "string");
  const voice = voiceOf(fields.voice);
  const onlyRobots = Boolean(fields.policy) && Array.isArray(fields.formats) && fields.formats.length === 0;
  return { name, prompts, starts, takesImage: fields.takes_image !== false, voice, makesWorlds: voice === null && !fields.policy, onlyRobots };
}

function voiceOf(value: unknown): Voice | null {
  if (typeof value !== "object" || value === null) return null;
  const { turn_modes: modes, takes_text: takesText, takes_tools: takesTools } = value as Record<string, unknown>;
  return { turn_modes: Array.isArray(modes) ? modes.map(String) : [], takes_text: takesText === true, takes_tools: takesTools === true };
}

export function startOf(model: string, start: string, base: string): StartPicture {
  return { name: start, url: `${base}/v1/models/${encodeURIComponent(model)}/starts/${encodeURIComponent(start)}.png` };
}

/** A picture of the user's, cut to the model's shape and made small enough for one message. Base64, PNG or JPEG. */
export async function packPicture(file: Blob, width: number, height: number, maxBytes: number): Promise<string> {
  const bitmap = await createImageBitmap(file);
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d", { alpha: false })!;
  context.imageSmoothingQuality = "high";
  const scale = Math.max(width / bitmap.width, height / bitmap.height);
  const [w, h] = [bitmap.width * scale, bitmap.height * scale];
  context.drawImage(bitmap, (width - w) / 2, (height - h) / 2, w, h);
  bitmap.close();
  for (const quality of [0.95, 0.85, 0.7, 0.5]) {
    const base64 = canvas.toDataURL("image/jpeg", quality).replace(/^[^,]*,/, "");
    if (base64.length <= maxBytes) return base64;
  }
  throw new Error("too large");
}
