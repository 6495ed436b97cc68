// The two pages of a server that has a world and a voice: links from one to the other, and none where there is only one.

import type { ModelInfo } from "./api";
import { byId } from "./dom";

export function showTabs(models: readonly ModelInfo[]): void {
  byId("tabs").hidden = !(models.some(({ makesWorlds }) => makesWorlds) && models.some(({ voice }) => voice));
}
