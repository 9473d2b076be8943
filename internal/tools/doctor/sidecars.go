package doctor

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/tools/migrate"
)

// program is the base name of the image of this program, with which a pod that has one
// of the old sidecars too shares its driver.
const program = "storage-controller"

// checkSidecars looks for the programs that would be replaced.
func (e *examination) checkSidecars(ctx context.Context) {
	const name = "sidecars"
	pods, err := kube.ListAll[*corev1.Pod](ctx, e.client.CoreV1().Pods(e.plan.PodNamespace).List)
	if err != nil {
		e.skip(name, "the pods of namespace %s were not read (%s): the command needs list on them for this", e.plan.PodNamespace, reason(err))
		return
	}
	var found []Check
	for _, pod := range pods {
		found = append(found, e.plan.sidecarsOf(pod)...)
	}
	if found == nil {
		e.ok(name, "none of the old ones in the %d pods of namespace %s", len(pods), e.plan.PodNamespace)
		return
	}
	e.report.Checks = append(e.report.Checks, found...)
}

// sidecarsOf is what pod has that does the same as a role.
func (p Plan) sidecarsOf(pod *corev1.Pod) []Check {
	if pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
		return nil
	}
	var found []Check
	containers := slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers)
	same := pod.Name == p.Pod || slices.ContainsFunc(containers, func(c corev1.Container) bool { return migrate.ImageName(c.Image) == program })
	for _, c := range containers {
		i := slices.IndexFunc(p.Roles, func(r Role) bool { return r.Sidecar != "" && slices.Contains(programs(c), r.Sidecar) })
		if i < 0 {
			continue
		}
		role := p.Roles[i]
		check := Check{Name: "sidecars", Status: Warning, Message: fmt.Sprintf("container %s of pod %s runs %s, which does what the role %s does", c.Name, pod.Name, role.Sidecar, role.Name)}
		turns := "the two take turns by the Lease"
		elect := elects(c, role.Sidecar) && p.LeaderElection && (role.Sidecar != topolvm || role.Lease == topolvmLease)
		if !elect {
			turns = "the two work at the same time, since they do not share a Lease"
		}
		switch {
		case role.Sidecar == topolvm && elect:
			check.Status, check.Message = OK, check.Message+"; the driver is in it, so it stays, and "+turns
		case role.Sidecar == topolvm:
			check.Hint = turns + ": set --profile=topolvm and --leader-election"
		case same:
			check.Hint = "remove it: " + program + " in the same pod does its work; until then " + turns
		default:
			check.Hint = "if it serves the same driver, remove it; until then " + turns
		}
		if same && !elect {
			check.Status = Failure
		}
		found = append(found, check)
	}
	return found
}

// TopoLVM's controller holds its Lease unless it is told not to, and has the driver in it.
const (
	topolvm      = "topolvm-controller"
	topolvmLease = "topolvm"
)

// programs is what c may run: images are called by their only program, or have several.
func programs(c corev1.Container) []string {
	image := migrate.ImageName(c.Image)
	if image == program { // under whatever name it is called
		return nil
	}
	if len(c.Command) > 0 {
		return []string{image, path.Base(c.Command[0])}
	}
	return []string{image, migrate.Sidecar(c.Name, c.Image, c.Args)}
}

// elects tells whether a sidecar takes notice of the Lease. TopoLVM's controller does so
// unless it is told otherwise.
func elects(c corev1.Container, sidecar string) bool {
	on := sidecar == topolvm
	for _, arg := range slices.Concat(c.Command, c.Args) {
		name, value, given := strings.Cut(strings.TrimLeft(arg, "-"), "=")
		if strings.HasPrefix(arg, "-") && (name == "leader-election" || name == "enable-leader-election" || name == "leader-elect") {
			on = !given || value == "true" || value == "1"
		}
	}
	return on
}
