// Who is here: the models of the server, and what stands in the way of asking for them. Owns the list and the chosen world.

import { apiKey, fetchModels, KeyWanted, Refused, type ModelInfo } from "./api";
import { errorNotice, robotsNotice } from "./messages";
import type { Panel } from "./panel";
import { showTabs } from "./tabs";
import type { View } from "./view";

export class Entrance {
  worlds: ModelInfo[] = [];
  /** Whether the server's HTTP side answered. */
  reachable = true;

  constructor(
    private readonly base: string, private readonly view: View, private readonly panel: Panel,
    public model: string | null, private readonly onModels: (models: readonly ModelInfo[]) => void,
    private readonly log: (text: string) => void,
  ) {}

  /** False where nobody may enter or there is no world, which the card then says. */
  async find(): Promise<boolean> {
    let models;
    try {
      models = await fetchModels(this.base);
    } catch (error) {
      return this.failed(error);
    }
    showTabs(models);
    this.onModels(models);
    const offered = this.offers(this.model);
    this.worlds = models.filter(({ makesWorlds }) => makesWorlds);
    if (offered && !this.offers(this.model)) this.forget(); // it came back with other worlds
    this.reachable = true;
    const [first] = models;
    if (first && models.every(({ onlyRobots }) => onlyRobots)) return this.robotsOnly(first.name);
    this.model ??= this.worlds[0]?.name ?? null;
    this.show();
    return true;
  }

  /** What the chosen world offers, in the panel. */
  show(): void {
    this.panel.models(this.worlds, this.model ?? "");
    const info = this.worlds.find(({ name }) => name === this.model);
    if (!info) return;
    this.panel.prompts(info.prompts);
    this.panel.starts(info.starts, info.takesImage);
  }

  /** The server does not have the chosen world. */
  forget(): void {
    this.model = null;
    this.panel.forgetBeginning(); // one of its start pictures
  }

  private offers(model: string | null): boolean {
    return this.worlds.some(({ name }) => name === model);
  }

  private robotsOnly(name: string): boolean {
    document.body.toggleAttribute("data-robots", true);
    document.title = "realtime_omni · a policy for robots";
    this.view.show(robotsNotice(name, `${location.origin.replace(/^http/, "ws")}${this.base}/v1/realtime/robot/openpi`));
    this.view.link("Ready for robots", "good");
    return false;
  }

  private failed(error: unknown): boolean {
    if (error instanceof KeyWanted) {
      const text = apiKey.get() ? "The server did not accept this key." : "The server wants an API key. It stays in this tab.";
      this.view.show({ title: "A key, please", text, actions: ["key"], tone: "bad" });
      this.view.link("Key wanted", "bad");
      return false;
    }
    if (error instanceof Refused) {
      this.view.show(errorNotice("origin_refused"));
      this.view.link("Refused", "bad");
      return false;
    }
    this.reachable = false;
    this.log(`models: ${String(error)}`); // the WebSocket may still work; it says more when it does not
    return true;
  }
}
