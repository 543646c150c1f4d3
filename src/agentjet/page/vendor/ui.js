// The names of the vendored libraries that the page uses: import from here only.
import { h } from "./preact.js";
import htm from "./htm.js";

export const html = htm.bind(h);
export { h, render, Fragment, createContext } from "./preact.js";
export {
  useCallback, useContext, useEffect, useErrorBoundary, useId, useLayoutEffect, useMemo, useReducer, useRef, useState,
} from "./hooks.js";
export {
  batch, computed, effect, signal, untracked, useComputed, useSignal, useSignalEffect,
} from "./signals.js";
