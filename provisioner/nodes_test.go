//go:build !race

package provisioner

// competitors is how many nodes compete for claims in TestHundredNodes.
const competitors = 100
