package nodecontroller

import (
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"
)

// refresh is s with everything in it that the API server knows read from there. Only full
// reads what is needed before something is destroyed. known finds the names of nodes that
// volumes with some values may mean, as far as a cache tells, and every reads all nodes;
// likely is nodes that may be ready.
func (r *reader) refresh(ctx context.Context, s snapshot, key string, known func(values []string) []string, every func(context.Context) (*roll, error), likely []string, full bool) (snapshot, error) {
	s.now = time.Now()
	pv, ok, err := r.volume(ctx, s.volume.Name)
	if err != nil {
		return s, err
	}
	if !ok || pv.UID != s.volume.UID {
		s.volume = nil
		return s, nil
	}
	s.volume, s.claim, s.noClaim, s.namespace, s.refused = pv, nil, "", "", false
	s.nodes = mergeNames(s.nodes, r.policy.ann.lostNodes(pv))
	values, local := localValues(pv, r.policy.driver, key)
	if !local {
		s.member = membership{}
		return s, nil
	}
	names := slices.Concat(values, s.nodes, s.former, known(values))
	nodes, csiNodes, err := r.named(ctx, key, values, names)
	if err != nil {
		return s, err
	}
	s.member = r.policy.ann.locate(pv, values, key, nodes, csiNodes, s.former)
	if full && s.member.place != placeHealthy && s.member.place != placeUnclear { // which the rest would not change
		all, err := every(ctx)
		if err != nil {
			return s, err
		}
		if more := slices.DeleteFunc(all.candidates(values), func(n string) bool { return slices.Contains(names, n) }); len(more) > 0 {
			if nodes, csiNodes, err = r.named(ctx, key, values, slices.Concat(names, more)); err != nil {
				return s, err
			}
			s.member = r.policy.ann.locate(pv, values, key, nodes, csiNodes, s.former)
		}
	}
	if err := r.refreshClaim(ctx, &s, r.policy.ann.refusal(s.member, nodes)); err != nil {
		return s, err
	}
	if !full {
		return s, nil
	}
	s.facts = &facts{present: present(nodes, csiNodes)}
	granted, err := r.approval(ctx, s.now)
	if err != nil {
		return s, err
	}
	s.approved = granted.covers(s.nodes)
	return s, r.refreshFacts(ctx, &s, likely)
}

// refusal is a node of a volume that has opted out, nil when there is none: as long as
// there is a Node that is fenced or going, it has a say too, and of several each.
func (a annotations) refusal(m membership, nodes []*corev1.Node) *corev1.Node {
	if m.place != placeFenced && m.place != placeTerminating {
		return nil
	}
	i := slices.IndexFunc(nodes, func(n *corev1.Node) bool {
		return slices.Contains(m.hosts, n.Name) && n.Annotations[a.cleanup] == disabled
	})
	if i < 0 {
		return nil
	}
	return nodes[i]
}

// refreshClaim reads the claim, and who has a say about its clean-up.
func (r *reader) refreshClaim(ctx context.Context, s *snapshot, refusal *corev1.Node) error {
	say := map[string]metav1.Object{"PersistentVolume": s.volume}
	if s.hostRefuses = refusal != nil; s.hostRefuses {
		say["Node"] = refusal
	}
	if ref := s.volume.Spec.ClaimRef; namesClaim(ref) {
		claim, ok, err := r.claim(ctx, ref.Namespace, ref.Name)
		if err != nil {
			return err
		}
		if !ok {
			s.noClaim = ref.Namespace + "/" + ref.Name
		} else {
			s.claim = claim
			if claim.UID == ref.UID {
				say["PersistentVolumeClaim"] = claim
			}
		}
		ns, ok, err := r.namespace(ctx, ref.Namespace)
		if err != nil {
			return err
		}
		if ok {
			say["Namespace"], s.namespace, s.refused = ns, ns.UID, ns.Annotations[r.policy.ann.cleanup] == disabled
		}
	}
	if name := classOf(s.volume, s.claim); name != "" {
		class, ok, err := r.class(ctx, name)
		if err != nil {
			return err
		}
		if ok {
			say["StorageClass"] = class
		}
	}
	optOut := ""
	if s.tombstone != nil && s.tombstone.optedOut {
		optOut = "Node " + s.tombstone.name
	}
	if s.wishes = r.policy.ann.wishesOf(say); s.wishes.optOut == "" {
		s.wishes.optOut = optOut
	}
	return nil
}

// refreshFacts reads what only something that destroys needs.
func (r *reader) refreshFacts(ctx context.Context, s *snapshot, likely []string) (err error) {
	if phase := s.volume.Status.Phase; phase == corev1.VolumeReleased || phase == corev1.VolumeAvailable {
		if s.attachments, err = r.attachments(ctx, s.volume.Name); err != nil {
			return err
		}
	}
	if s.facts.readyNode, err = r.readyNode(ctx, likely); err != nil {
		return err
	}
	if s.facts.sameCluster, err = r.sameCluster(ctx); err != nil {
		return err
	}
	// Another claim of the name is what a StatefulSet has made meanwhile, and its pod runs.
	if ref := s.volume.Spec.ClaimRef; s.claim == nil || ref == nil || ref.UID != s.claim.UID {
		return nil
	}
	var except []string // pods on a node that is fenced or going do not use it for long
	if s.member.place != placeOrphan {
		except = s.member.hosts
	}
	s.facts.users, err = r.users(ctx, s.claim.Namespace, s.claim.Name, except)
	return err
}

func present(nodes []*corev1.Node, csiNodes []*storagev1.CSINode) []string {
	var names []string
	for _, n := range nodes {
		names = append(names, "Node "+n.Name)
	}
	for _, n := range csiNodes {
		names = append(names, "CSINode "+n.Name)
	}
	return names
}

func mergeNames(a, b []string) []string {
	all := slices.Concat(a, b)
	slices.Sort(all)
	return slices.Compact(all)
}

func classOf(pv *corev1.PersistentVolume, claim *corev1.PersistentVolumeClaim) string {
	if name := pv.Spec.StorageClassName; name != "" || claim == nil {
		return name
	}
	return storagehelpers.GetPersistentVolumeClaimClass(claim)
}
