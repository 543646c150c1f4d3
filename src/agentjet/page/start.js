// Opens the session and begins to read the run, while the browser still loads the views.
import { open } from "./session.js";
import { start } from "./stream.js";

// Settles when the session is known.
export const opened = open().then(start);
