//go:build !race

package nodecleanup

// histories is the number of histories of [TestPromises].
const histories = 100_000
