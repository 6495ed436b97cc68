// The Talk page: finds out who is there and waits for a click, without which no browser gives sound.

import { Talk } from "./talk";

const talk = new Talk();

/** For tests and for people with a console. */
declare global {
  interface Window { realtimeTalk: ReturnType<Talk["debug"]> }
}
window.realtimeTalk = talk.debug();
void talk.find();
