// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// collector reads the state at each scrape. The first three metrics have the names of
// csi-provisioner.
type collector struct {
	counts                                   func() counts
	goal, current, obsolete, failing, oldest *prometheus.Desc
}

func newMetrics(reg prometheus.Registerer, read func() counts) {
	desc := func(name, help string) *prometheus.Desc { return prometheus.NewDesc(name, help, nil, nil) }
	reg.MustRegister(&collector{
		counts: read,
		goal: desc("csistoragecapacities_desired_goal",
			"Pairs of a StorageClass and a topology segment whose capacity is published."),
		current: desc("csistoragecapacities_desired_current",
			"Pairs that have a CSIStorageCapacity object. Not counted: pairs with zero capacity."),
		obsolete: desc("csistoragecapacities_obsolete",
			"CSIStorageCapacity objects to delete, because their StorageClass or last node was deleted."),
		failing: desc("storage_controller_capacity_failing",
			"Pairs whose last GetCapacity call, or the write of its response, failed. Their published capacity is out of date."),
		oldest: desc("storage_controller_capacity_oldest_seconds",
			"Age of the oldest published GetCapacity response."),
	})
}

// Describe implements [prometheus.Collector].
func (c *collector) Describe(out chan<- *prometheus.Desc) { prometheus.DescribeByCollect(c, out) }

// Collect implements [prometheus.Collector].
func (c *collector) Collect(out chan<- prometheus.Metric) {
	now := c.counts()
	age := 0.0
	if !now.oldest.IsZero() {
		age = time.Since(now.oldest).Seconds()
	}
	for desc, value := range map[*prometheus.Desc]float64{
		c.goal: float64(now.goal), c.current: float64(now.current), c.obsolete: float64(now.obsolete),
		c.failing: float64(now.failing), c.oldest: age,
	} {
		out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value)
	}
}
