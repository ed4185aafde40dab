// What every client is asked, and the report of how it went: asked.py in JavaScript.
import assert from "node:assert/strict";

export const URL = process.env.CLIENTS_URL; // server of the embedded model
export const SCRIPTED_URL = process.env.CLIENTS_SCRIPTED_URL; // one that calls look_up
export const KEY = "made-up";
export const MODEL = "recall";
export const CODE = "4821";
export const QUESTION = `The code of the amber falcon is ${CODE}. What is the code of the amber falcon?`;
export const TASK = "What is the code of the falcon? (task 1)";
export const SAID = "The code of the falcon is 4821.";
export const DESCRIPTION = "Return the code of a thing.";

const called = [];

export function lookUp({ thing }) {
  assert.equal(thing, "falcon");
  called.push(thing);
  return CODE;
}

export function wasCalled() {
  assert.deepEqual(called, ["falcon"]);
}

export async function report(steps) {
  for (const [step, run] of Object.entries(steps)) {
    called.length = 0;
    let error = null;
    try {
      await run();
    } catch (raised) {
      error = `${raised.name}: ${raised.message}`;
      console.error(raised);
    }
    console.log(JSON.stringify({ step, error }));
  }
}
