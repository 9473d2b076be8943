//go:build race

package nodecleanup

// histories is the number of histories of [TestPromises] with the race detector.
const histories = 1_000
