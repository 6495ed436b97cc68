// How a session begins or begins again, from what the panel says.

import { packPicture } from "./api";
import type { ResetOptions, StartOptions } from "./machine";
import { promptOf, type Panel } from "./panel";
import type { Format, Started } from "./protocol";

const START_PICTURE_BYTES = 3_000_000; // a session.start may be 4 MiB
const UNKNOWN_SIZE = { width: 256, height: 256 };

export async function startOptions(panel: Panel, model: string | null, format: Format, last: Started | null): Promise<StartOptions> {
  const options: StartOptions = { format };
  if (panel.choice !== undefined) options.id = panel.choice;
  if (model) options.model = model;
  if (panel.seed !== undefined) options.seed = panel.seed;
  const { beginning } = panel;
  const { width, height } = last ?? UNKNOWN_SIZE;
  if (beginning && "start" in beginning) options.start = beginning.start;
  else if (beginning) options.image = await packPicture(beginning.picture, width, height, START_PICTURE_BYTES);
  return options;
}

/** Throws for a picture that does not fit a message. */
export async function resetOptions(panel: Panel, session: Started): Promise<ResetOptions> {
  const options: ResetOptions = {};
  if (panel.choice !== undefined) options.id = panel.choice;
  if (panel.seed !== undefined) options.seed = panel.seed;
  const { beginning } = panel;
  if (beginning && "start" in beginning) {
    options.start = beginning.start;
    // What a reset does not name stays as it was: without this, the picture of one place would turn into another.
    const prompt = promptOf(beginning.start, session.prompts);
    if (prompt !== null) options.prompt = prompt;
  } else if (beginning) {
    const { width, height, limits } = session;
    options.image = await packPicture(beginning.picture, width, height, limits.max_message_bytes - 1_024);
  }
  return options;
}
