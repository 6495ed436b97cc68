// The page: reads its options, finds out what the server has, and starts.

import { App } from "./app";
import type { Format } from "./protocol";

const query = new URLSearchParams(location.search);
const wanted = query.get("format");
const format = (["h264", "jpeg", "rgb24"] as const).find((name) => name === wanted) as Format | undefined;
const app = new App({ format: format ?? null, model: query.get("model"), debug: query.has("debug") });

/** For tests and for people with a console: numbers, and two ways to break things. */
declare global {
  interface Window { realtimeOmni: ReturnType<App["debug"]> }
}
window.realtimeOmni = app.debug();
void app.begin();
