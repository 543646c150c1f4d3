// Pure functions over the values of a curve: a number or null for each x.

import { number } from "./format.js";

// Returns the exponential moving average with weight `weight` (0 to below 1) of the values before. It starts at the
// first value without a bias towards 0. A null stays null and does not count.
export function smoothed(values, weight) {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = sum * weight + value;
    total = total * weight + 1;
    return sum / total;
  });
}

// Returns the index of the newest value, or -1.
export function newest(values) {
  return values.findLastIndex((value) => value !== null);
}

// Returns the sentence that stands for the picture of a curve.
export function sentence(name, values) {
  const found = values.filter((value) => value !== null);
  if (!found.length) return `${name} has no value yet.`;
  const [first, last] = [found[0], found[found.length - 1]];
  if (found.length === 1) return `${name} is ${number(first)} in its only step.`;
  const [low, high] = extent(found);
  const verb = last > first ? "rose" : last < first ? "fell" : "";
  const change = verb ? `${verb} from ${number(first)} to ${number(last)}` : `began and ended at ${number(last)}`;
  return `${name} ${change} over ${found.length} steps; lowest ${number(low)}, highest ${number(high)}.`;
}

// Returns the least and the greatest value; null without one.
export function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value === null) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low > high ? null : [low, high];
}

// Returns the values at each x, which is one of `versions`; elsewhere null.
export function placed(x, versions, values) {
  const known = new Map(versions.map((version, index) => [version, values?.[index] ?? null]));
  return x.map((version) => known.get(version) ?? null);
}

// The name of the scores of an evaluation. A run is judged by held-out scores only, so they have their own.
const scoreName = ({ held_out, name }) => (held_out ? "held-out score" : name || "evaluation");
const tasksOf = ({ name, task_list }) => `${name || "evaluation"} (${task_list || "tasks not recorded"})`;

// The name of the curve of an evaluation among others: scores of different tasks are different curves.
function curveName(one, among) {
  const named = among.filter((other) => scoreName(other) === scoreName(one));
  if (new Set(named.map(tasksOf)).size < 2) return scoreName(one);
  return one.held_out ? `held-out score of ${tasksOf(one)}` : tasksOf(one);
}

// Returns the scores of evaluations at each x, by the name of their curve among the evaluations of all runs.
export function scoreCurves(x, evaluations, among = evaluations) {
  const names = evaluations.map((one) => curveName(one, among));
  return [...new Set(names)].map((name) => {
    const those = evaluations.filter((_, index) => names[index] === name);
    return { name, values: placed(x, those.map((one) => one.policy_version), those.map((one) => one.score)) };
  });
}

// Returns the running sum. A null counts as 0.
export function running(values) {
  let sum = 0;
  return values.map((value) => (sum += value ?? 0));
}

// Returns the first step of each code version: [{ x: version, name }].
export function codeMarkers(steps) {
  return Object.entries(steps.metrics).flatMap(([name, values]) => {
    const code = name.match(/^code\/(.*)\/reward_mean$/s)?.[1];
    const first = values.findIndex((value) => value !== null);
    return code === undefined || first <= 0 ? [] : [{ x: steps.versions[first], name: `code ${code}` }];
  });
}
