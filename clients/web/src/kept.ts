// The session that this tab comes back to after a reload, in sessionStorage. Taken out when read: a session that can't be
// resumed must not be tried at every reload.

import type { Saved } from "./machine";

export interface Kept { saved: Saved; pausedByPage: boolean }

const ITEM = "realtime_omni.session";

export const keptSession = {
  put(kept: Kept): void {
    sessionStorage.setItem(ITEM, JSON.stringify(kept));
  },
  take(): Kept | null {
    const text = sessionStorage.getItem(ITEM);
    sessionStorage.removeItem(ITEM);
    try {
      return text ? (JSON.parse(text) as Kept) : null;
    } catch {
      return null;
    }
  },
  forget(): void {
    sessionStorage.removeItem(ITEM);
  },
};
