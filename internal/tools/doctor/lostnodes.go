// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/tools/apiread"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
)

// checkLostNodes checks the records of lost nodes, if the nodecontroller would run.
func (e *examination) checkLostNodes(ctx context.Context) {
	if !e.plan.runs("nodecontroller") {
		return
	}
	name := nodecleanup.ConfigMapName(e.driver.Name)
	query := apiread.Query{Topic: "lost nodes", What: apiread.Name("ConfigMap", e.plan.PodNamespace, name)}
	cm := apiread.Get(ctx, e.reader, query, name, e.Kubernetes.CoreV1().ConfigMaps(e.plan.PodNamespace).Get)
	switch {
	case cm.Missing:
		e.ok("lost nodes", "no ConfigMap %s in namespace %s", name, e.plan.PodNamespace)
	case cm.Found:
		e.Findings = append(e.Findings, lostNodes(cm.Value, e.driver.Name, e.Clock.Now())...)
	}
}

// lostNodes checks the records in a ConfigMap.
func lostNodes(cm *corev1.ConfigMap, driver string, now time.Time) []finding.Finding {
	records := nodecleanup.ParseLostNodes(cm)
	count := fmt.Sprintf("%s in ConfigMap %s", finding.Plural(len(records), "record"), cm.Name)
	found := []finding.Finding{finding.New(finding.OK, "lost nodes", count, "")}
	warn := func(message, next string) {
		found = append(found, finding.New(finding.Warning, "lost nodes", message, next))
	}
	var held, unparsable []string
	for _, r := range records {
		switch r.State() {
		case nodecleanup.RecordUnparsable:
			unparsable = append(unparsable, r.Value)
		case nodecleanup.RecordHeld:
			held = append(held, r.Name())
		}
	}
	if len(held) > 0 {
		approve := fmt.Sprintf("verify that they do not return, then run storage-controller nodecontroller approve --driver-name=%s "+
			"--namespace=%s %s --yes", driver, cm.Namespace, strings.Join(held, " "))
		warn("held until an approval, because too many nodes are lost: "+kube.ShortList(held, maxNames), approve)
	}
	if len(unparsable) > 0 {
		const effect = "cannot be parsed, and count as held and opted out, so that further lost nodes are held: "
		warn(effect+kube.ShortList(unparsable, maxNames), "correct or remove these records in the ConfigMap")
	}
	checked := cm.Annotations[nodecleanup.AnnotationLastLook]
	switch last, err := time.Parse(time.RFC3339, checked); {
	case len(records) == 0:
	case err != nil:
		warn(fmt.Sprintf("the annotation %s is not an RFC 3339 time: %q", nodecleanup.AnnotationLastLook, checked),
			"check that the nodecontroller is running, and its log")
	case now.Sub(last) > nodecleanup.DefaultSettings().ClockGap:
		warn("no nodecontroller has checked the lost nodes for "+duration.HumanDuration(now.Sub(last))+
			". Their grace periods start again at the next check", "check that the nodecontroller is running, and its log")
	}
	return found
}
